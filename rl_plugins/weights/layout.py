"""An engine's parameters in memory that other processes can map, and where in it each tensor of a checkpoint belongs.

A loader of weights copies the tensors of a checkpoint into parameters that may hold several of them (query, key and
value in one). `Placement` finds out which bytes each of them goes to by watching one load, so that a trainer can write
them there itself: one copy, no bucket, no work for the engine. What a loader does not copy as it is (transposed, say)
gets memory of its own, from which the engine loads it.
"""

from __future__ import annotations

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
    """A run of elements of a checkpoint's tensor, and where it belongs.

    Attributes:
        name: of the tensor.
        start: first element, in the flattened tensor.
        count: number of elements.
        offset: where they go in the shared memory, in bytes.
        dtype: what they are there; writing converts.
    """

    name: str
    start: int
    count: int
    offset: int
    dtype: str


class SharedMemory:
    """Memory of this process that others map by its file descriptor; it goes when the last of them ends."""

    def __init__(self, size: int) -> None:
        # Not in /dev/shm, which containers keep small.
        self.fd = os.memfd_create("rl_plugins-weights")
        self.size = max(size, 1)
        os.ftruncate(self.fd, self.size)
        self.bytes = map_shared(self.fd, self.size)

    @property
    def held(self) -> int:
        """Bytes that it takes, whoever has mapped it: pages that were never written take none."""
        return os.fstat(self.fd).st_blocks * _BLOCK_BYTES

    def give_back(self) -> None:
        """Free its pages for all who map it: they read as zeros, and take memory again when they are written."""
        with mmap.mmap(self.fd, self.size) as everything:
            everything.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Give up the descriptor; tensors in the memory live on."""
        os.close(self.fd)


def map_shared(fd: int, size: int) -> Tensor:
    """The memory behind a descriptor as a tensor of bytes."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)


def share_parameters(module: nn.Module) -> SharedMemory:
    """Move the module's parameters into shared memory, one after the other; tied ones stay tied."""
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
class Placement:
    """Where the tensors of a checkpoint go.

    Attributes:
        direct: pieces that belong into the parameters' memory.
        staged: whole tensors that the engine must load from memory of their own.
    """

    direct: list[Piece]
    staged: list[Piece]

    @property
    def staged_bytes(self) -> int:
        """Size of the memory for the staged tensors."""
        return sum(_aligned(piece.count * dtype_named(piece.dtype).itemsize) for piece in self.staged)


def place_weights(memory: SharedMemory, metadata: list[WeightMeta], load_weights: LoadWeights) -> Placement:
    """Watch `load_weights` copy tensors of these names, dtypes and shapes into parameters that lie in `memory`.

    Nothing is copied.
    """
    direct: list[Piece] = []
    staged: list[Piece] = []
    staged_offset = 0
    for meta in metadata:
        # Never written, so it takes no memory.
        tensor = torch.empty(meta.shape, dtype=meta.dtype)
        with _CopyWatch(tensor, memory.bytes) as watch:
            load_weights([(meta.name, tensor)])
        if watch.saw_only_copies:
            direct += [Piece(meta.name, *run) for run in watch.runs]
        else:
            staged.append(Piece(meta.name, 0, meta.numel, staged_offset, dtype_name(meta.dtype)))
            staged_offset += _aligned(meta.nbytes)
    return Placement(direct, staged)


class _CopyWatch(TorchDispatchMode):
    """Notes which elements of `source` are copied where into `target`, instead of copying them.

    Attributes:
        runs: first element, number of elements, byte in the target, dtype there.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        super().__init__()
        self._source, self._target = source, target
        self.runs: list[tuple[int, int, int, str]] = []
        self._constant: list[tuple[int, int]] = []
        self._unknown = False

    @property
    def saw_only_copies(self) -> bool:
        """Each element was copied once, and nothing else written but constants beside them (padding)."""
        copied = [(begin, begin + count * dtype_named(dtype).itemsize) for _, count, begin, dtype in self.runs]
        apart = all(stop <= begin or end <= start for start, stop in self._constant for begin, end in copied)
        return apart and not self._unknown and sum(count for _, count, _, _ in self.runs) == self._source.numel()

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
        elif inside and func is torch.ops.aten.copy_.default and self._is_as_it_is(args[1], target.numel()):
            self.runs.append((int(args[1].storage_offset()), target.numel(), begin, dtype_name(target.dtype)))
        elif inside and func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._constant.append((begin, begin + target.nbytes))
        else:
            self._unknown = True
        return target

    def _is_as_it_is(self, source: Tensor, count: int) -> bool:
        mine = source.untyped_storage().data_ptr() == self._source.untyped_storage().data_ptr()
        return mine and source.is_contiguous() and source.numel() == count and source.dtype == self._source.dtype


def views(memory: Tensor, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece with the flat tensor in `memory` that it belongs to."""
    for piece in pieces:
        dtype = dtype_named(piece.dtype)
        yield piece, memory[piece.offset : piece.offset + piece.count * dtype.itemsize].view(dtype)


def gaps(pieces: Iterable[Piece], memory: SharedMemory) -> Iterator[tuple[int, int]]:
    """First byte of each run of bytes in the memory that belongs to no piece, and the byte after its last."""
    reached = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset > reached:
            yield reached, piece.offset
        reached = max(reached, piece.offset + piece.count * dtype_named(piece.dtype).itemsize)
    if reached < memory.size:
        yield reached, memory.size


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
