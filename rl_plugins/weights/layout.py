"""Layout of an engine's parameters in shared memory, and the place of each checkpoint tensor in the memory.

The weight loader of a model copies checkpoint tensors into parameters. One parameter may hold several tensors (query,
key and value, for example). `place_weights` watches one load and records the destination of each tensor. A trainer can
then write the tensors to the destinations directly: one copy, no bucket, no work for the engine. Tensors changed by
the loader (a transposed tensor, for example) get separate memory, from which the engine loads the tensors.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_plugins.weights.source import WeightMeta

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]
_ALIGNMENT = 64
# The unit of st_blocks.
_BLOCK_BYTES = 512


@dataclass(frozen=True)
class Piece:
    """A range of elements of a checkpoint tensor, and the place of the range in memory.

    Attributes:
        name: name of the tensor.
        start: index of the first element in the flattened tensor.
        count: number of elements.
        offset: position in the shared memory, in bytes.
        dtype: dtype in the shared memory; a write converts.
    """

    name: str
    start: int
    count: int
    offset: int
    dtype: str


class SharedMemory:
    """Memory shared with other processes by a file descriptor. Linux frees the memory when the last process ends."""

    def __init__(self, size: int) -> None:
        # Not in /dev/shm, which containers keep small.
        self.fd = os.memfd_create("rl_plugins-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size = max(size, 1)
        os.ftruncate(self.fd, self.size)
        # A process that uses memory beyond the end of a shortened file dies.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.bytes = map_shared(self.fd, self.size)

    @property
    def resident_bytes(self) -> int:
        """Resident bytes over all processes. A page takes memory from the first write on."""
        return os.fstat(self.fd).st_blocks * _BLOCK_BYTES

    def give_back(self) -> None:
        """Free the pages in all processes. Freed pages read as zeros, and take memory again after a write."""
        with mmap.mmap(self.fd, self.size) as everything:
            everything.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Close the file descriptor. Tensors in the memory stay valid."""
        os.close(self.fd)


def map_shared(fd: int, size: int) -> Tensor:
    """Return the memory of a file descriptor as a uint8 tensor of `size` bytes."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)


def share_parameters(module: nn.Module) -> SharedMemory:
    """Move the parameters of a module into shared memory. Tied parameters stay tied."""
    parameters = list(module.parameters())
    memory = SharedMemory(sum(_aligned(parameter.nbytes) for parameter in parameters))
    offset = 0
    for parameter in parameters:
        place = memory.bytes[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        place.copy_(parameter.data)
        parameter.data = place
        offset += _aligned(parameter.nbytes)
    return memory


@dataclass(frozen=True)
class WeightPlaces:
    """Places of the tensors of a checkpoint.

    Attributes:
        direct: pieces in the memory of the parameters.
        staged: complete tensors in separate memory, from which the engine loads the tensors.
    """

    direct: list[Piece]
    staged: list[Piece]

    @property
    def staged_bytes(self) -> int:
        """Size of the memory for the staged tensors, in bytes."""
        return sum(_aligned(piece.count * dtype_named(piece.dtype).itemsize) for piece in self.staged)


def place_weights(memory: SharedMemory, metadata: list[WeightMeta], load_weights: LoadWeights) -> WeightPlaces:
    """Find the place of each tensor by watching `load_weights`, without copying data.

    Args:
        memory: shared memory of the parameters.
        metadata: descriptions of the tensors.
        load_weights: weight loader of the model.
    """
    direct: list[Piece] = []
    staged: list[Piece] = []
    staged_offset = 0
    for meta in metadata:
        # Pages without a write take no memory.
        tensor = torch.empty(meta.shape, dtype=meta.dtype)
        with _CopyWatch(tensor, memory.bytes) as watch:
            load_weights([(meta.name, tensor)])
        if watch.saw_only_copies:
            direct += [Piece(meta.name, *copy) for copy in watch.copies]
        else:
            staged.append(Piece(meta.name, 0, meta.numel, staged_offset, dtype_name(meta.dtype)))
            staged_offset += _aligned(meta.nbytes)
    return WeightPlaces(direct, staged)


class _CopyWatch(TorchDispatchMode):
    """Record copies from `source` to `target` instead of copying.

    Attributes:
        copies: first element, number of elements, byte offset in `target`, and dtype in `target`, for each copy.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        super().__init__()
        self._source, self._target = source, target
        self.copies: list[tuple[int, int, int, str]] = []
        self._constant: list[tuple[int, int]] = []
        self._unknown = False

    @property
    def saw_only_copies(self) -> bool:
        """True if each element was copied once, and all other writes were constants outside the copies (padding)."""
        copied = [(begin, begin + count * dtype_named(dtype).itemsize) for _, count, begin, dtype in self.copies]
        apart = all(stop <= begin or end <= start for start, stop in self._constant for begin, end in copied)
        return apart and not self._unknown and sum(count for _, count, _, _ in self.copies) == self._source.numel()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        ]
        if not written:
            return func(*args, **(kwargs or {}))
        target = written[0]
        begin = target.data_ptr() - self._target.data_ptr()
        inside = begin >= 0 and begin + target.nbytes <= self._target.nbytes and target.is_contiguous()
        if target.numel() == 0:
            pass
        elif inside and func is torch.ops.aten.copy_.default and self._is_unchanged(args[1], target.numel()):
            self.copies.append((int(args[1].storage_offset()), target.numel(), begin, dtype_name(target.dtype)))
        elif inside and func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._constant.append((begin, begin + target.nbytes))
        else:
            self._unknown = True
        return target

    def _is_unchanged(self, source: Tensor, count: int) -> bool:
        same_storage = source.untyped_storage().data_ptr() == self._source.untyped_storage().data_ptr()
        return (
            same_storage and source.is_contiguous() and source.numel() == count and source.dtype == self._source.dtype
        )


def views(memory: Tensor, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield each piece with the flat tensor at the place of the piece in `memory`."""
    for piece in pieces:
        dtype = dtype_named(piece.dtype)
        yield piece, memory[piece.offset : piece.offset + piece.count * dtype.itemsize].view(dtype)


def gaps(pieces: Iterable[Piece], memory: SharedMemory) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` of each run of bytes in `memory` outside all pieces."""
    reached = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset > reached:
            yield reached, piece.offset
        reached = max(reached, piece.offset + piece.count * dtype_named(piece.dtype).itemsize)
    if reached < memory.size:
        yield reached, memory.size


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for example `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name; the inverse of `dtype_name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
