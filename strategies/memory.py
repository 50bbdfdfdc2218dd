"""Device memory for the rollout engine: the storages of training's tensors move to the host and back.

The tensor objects and all references to the objects stay valid. Copies back to a GPU run on a stream of their own, so
optimizer states come back while the models run again. `HostMemory` moves storages, so tensors in one storage
(flat buffers, views, shards) need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rl_plugins.memory import SPARE_SHARE

CHUNK_BYTES = 2**28
"""Size of a chunk of host memory: 256 MiB."""


class TrainingMemory:
    """Tensors of trained models, in host memory while the rollout engine samples.

    Args:
        optimizer_tensors: function that returns the tensors of the optimizers: states and master weights.
        model_tensors: function that returns the tensors of the models, such as parameters.
        zero_tensors: function that returns tensors full of zeros in a rollout phase, such as buffers of gradients. Such
            tensors are freed without a copy.

    Attributes:
        crowded: False if the rollout engine has room beside all states, so nothing moves in this phase.
    """

    def __init__(
        self,
        optimizer_tensors: Callable[[], Iterable[Tensor]] = tuple,
        model_tensors: Callable[[], Iterable[Tensor]] = tuple,
        zero_tensors: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._optimizer_tensors, self._model_tensors = optimizer_tensors, model_tensors
        self._zero_tensors = zero_tensors
        self.optimizer_host, self.model_host = HostMemory(), HostMemory()
        self.crowded = True

    def measure_room(self, device: torch.device, engine_share: float | None) -> None:
        """Set `crowded` for a rollout phase, before the rollout engine takes memory.

        Args:
            device: device of this rank.
            engine_share: largest share of the memory of a GPU in use by the engine; None if unknown.
        """
        self.crowded = engine_share is None or not _has_room(device, engine_share + SPARE_SHARE)

    def release_unused(self, device: torch.device) -> None:
        """Return the memory of deleted tensors, such as activations, to the device: another process can then use it."""
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def optimizer_tensors(self) -> Iterable[Tensor]:
        """Return the tensors of the optimizers on a crowded device, which are on the host in a rollout phase."""
        return self._optimizer_tensors() if self.crowded else ()

    def model_tensors(self) -> Iterable[Tensor]:
        """Return the tensors of the models on a crowded device, which are on the host in a rollout phase."""
        return self._model_tensors() if self.crowded else ()

    def zero_tensors(self) -> Iterable[Tensor]:
        """Return the tensors of zeros on a crowded device, whose memory is free in a rollout phase."""
        return self._zero_tensors() if self.crowded else ()

    def optimizer_bytes(self) -> int:
        """Return the number of bytes to be freed by `offload_optimizer`."""
        return self.optimizer_host.nbytes(self.optimizer_tensors())

    def offload_optimizer(self) -> None:
        """Free the device memory of optimizer states."""
        self.optimizer_host.move_to_host(self.optimizer_tensors())

    def parameter_bytes(self) -> int:
        """Return the number of bytes to be freed by `offload_parameters`."""
        return self.model_host.nbytes(self.model_tensors()) + self.model_host.nbytes(self.zero_tensors())

    def offload_parameters(self) -> None:
        """Free the device memory of parameters and gradients."""
        self.model_host.move_to_host(self.model_tensors(), zeros=self.zero_tensors())

    def reload_parameters(self) -> None:
        """Bring parameters and gradients back to the device."""
        self.model_host.move_back()
        self.model_host.wait()

    def reload_optimizer(self) -> None:
        """Start to bring optimizer states back to the device. `wait_for_optimizer` must precede their next use."""
        self.optimizer_host.move_back()

    def wait_for_optimizer(self) -> None:
        """Let the next work on the device wait for the optimizer states."""
        self.optimizer_host.wait()


class HostMemory:
    """Holds the contents of device storages until `move_back`.

    The contents lie one behind the other in chunks of host memory, which are kept for the next call. Chunks are pinned,
    because copies from and to pinned memory are faster and do not wait for each other. PyTorch rounds a pinned
    allocation up to a power of two and never returns the memory to the system, so chunks have this size.

    Args:
        device_type: type of the device to free memory on. Tensors on other devices are left unchanged, and tensors
            whose memory PyTorch cannot free, such as a memory-mapped file.
        chunk_bytes: size of a chunk.
    """

    def __init__(self, device_type: str = "cuda", chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device_type, self._chunk_bytes = device_type, chunk_bytes
        self._chunks: list[Tensor] = []
        self._used_bytes = 0
        # A storage of zeros has no pieces.
        self._taken: list[tuple[torch.UntypedStorage, int, list[Tensor]]] = []
        self._stream: torch.cuda.Stream | None = None

    def nbytes(self, tensors: Iterable[Tensor]) -> int:
        """Return the number of bytes of device memory to be freed by `move_to_host`."""
        return sum(storage.nbytes() for storage in self._storages(tensors))

    def move_to_host(self, tensors: Iterable[Tensor], zeros: Iterable[Tensor] = ()) -> None:
        """Copy the storages of tensors to the host and free the device memory. A DTensor gives this rank's shard.

        The tensors must not be read or written until `move_back` and `wait`.

        Args:
            tensors: tensors to copy.
            zeros: tensors full of zeros, which need no copy.
        """
        self.wait()
        taken: list[tuple[torch.UntypedStorage, int, list[Tensor]]] = []
        for storage in self._storages(tensors):
            pieces = list(self._host_pieces(storage.nbytes()))
            for piece, part in zip(pieces, _parts_of(storage, pieces), strict=True):
                piece.copy_(part, non_blocking=True)
            taken.append((storage, storage.nbytes(), pieces))
        taken += [(storage, storage.nbytes(), []) for storage in self._storages(zeros)]
        if not taken:
            return
        self._taken += taken
        self._wait_for_copies()
        for storage, _, _ in taken:
            storage.resize_(0)
        if self._on_cuda:
            torch.cuda.empty_cache()

    def move_back(self) -> None:
        """Start to copy all storages back to the device. The tensors must not be used until `wait`."""
        for storage, nbytes, _ in self._taken:
            storage.resize_(nbytes)
        with self._copying():
            for storage, _, pieces in self._taken:
                if not pieces:
                    _bytes_of(storage).zero_()
                    continue
                for piece, part in zip(pieces, _parts_of(storage, pieces), strict=True):
                    part.copy_(piece, non_blocking=True)
        self._taken.clear()
        self._used_bytes = 0

    def wait(self) -> None:
        """Let the next work of the current stream wait for the copies of `move_back`. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Run copies on the stream for copies, after the present work: the device memory may just have been freed."""
        if not self._on_cuda:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    @property
    def _on_cuda(self) -> bool:
        # A strategy on the CPU has no CUDA tensors, and PyTorch may be a build without CUDA.
        return self._device_type == "cuda" and torch.cuda.is_initialized()

    def _wait_for_copies(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
        """Yield each storage of the tensors on the device once."""
        seen = set()
        for part in (part for tensor in tensors for part in _plain_tensors(tensor)):
            storage = part.untyped_storage()
            movable = storage.device.type == self._device_type and storage.resizable()
            if movable and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage

    def _host_pieces(self, nbytes: int) -> Iterator[Tensor]:
        """Yield the next bytes of host memory, `nbytes` in all."""
        while nbytes:
            index, offset = divmod(self._used_bytes, self._chunk_bytes)
            if index == len(self._chunks):
                pinned = self._device_type == "cuda"
                self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pinned))
            piece = self._chunks[index][offset : offset + nbytes]
            self._used_bytes += piece.numel()
            nbytes -= piece.numel()
            yield piece


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with storage: a DTensor has a shard, and a quantised tensor has codes and scales."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
        if isinstance(part, Tensor):
            yield from _plain_tensors(part)


def _has_room(device: torch.device, share: float) -> bool:
    """Return True if a share of a GPU's memory is free for another process."""
    if device.type != "cuda":
        return False
    for _ in range(2):
        free, total = torch.cuda.mem_get_info(device)
        if free >= share * total:
            return True
        # PyTorch holds the memory of deleted tensors, such as the activations of the last update.
        torch.cuda.empty_cache()
    return False


def _parts_of(storage: torch.UntypedStorage, pieces: list[Tensor]) -> Sequence[Tensor]:
    """Return the bytes of a storage in parts of the sizes of the pieces."""
    return _bytes_of(storage).split([piece.numel() for piece in pieces])


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
