"""Memory freed by a phase: measured, and compared with the expected amount.

Without a check, a phase without effect goes unnoticed until a later phase runs out of memory. Therefore each phase
declares how much memory must be freed (`expected`). The kernel's counters of the process measure the freed memory on a
CPU, and PyTorch's allocator the freed memory of training on a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SPARE_SHARE = 0.05
"""Share of a GPU for buffers of weight updates, CUDA graphs and fragments, beside a rollout engine and the trainer."""
_SHARE = 0.9
# The kernel's counters of a process lag behind by some pages on each of its CPUs.
_SLACK_BYTES = 16 * 2**20
_MIB = 2**20


class MemoryNotFreed(RuntimeError):
    """A phase freed too little memory. The message names the phase, and the expected and measured amounts."""


@dataclass(frozen=True)
class MemoryChange:
    """Memory of a process before and after a phase, in bytes.

    Attributes:
        before: bytes in use before the phase.
        after: bytes in use after the phase.
        expected: least number of bytes to be freed by the phase.
    """

    before: int
    after: int
    expected: int

    @classmethod
    def total(cls, changes: Iterable[MemoryChange]) -> MemoryChange:
        """Return the sum over several processes."""
        parts = list(changes)
        return cls(sum(p.before for p in parts), sum(p.after for p in parts), sum(p.expected for p in parts))

    def check(self, phase: str) -> None:
        """Check for at least nine tenths of the expected amount, because the counters are not exact.

        Args:
            phase: name of the phase, for the message.

        Raises:
            MemoryNotFreed: the phase freed less memory.
        """
        freed = self.before - self.after
        if freed < _SHARE * self.expected - _SLACK_BYTES:
            raise MemoryNotFreed(
                f"phase {phase!r} freed {freed / _MIB:.0f} MiB instead of {self.expected / _MIB:.0f} MiB: "
                f"{self.before / _MIB:.0f} MiB were in use before the phase, {self.after / _MIB:.0f} MiB after it"
            )


def resident_bytes(storage: Tensor) -> int:
    """Return the resident bytes of a CPU tensor, counted in whole pages.

    Args:
        storage: contiguous tensor. Private memory is not resident before the first write.
    """
    start, size = _whole_pages(storage)
    present = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    _call("mincore", start, size, present)
    # The lowest bit is 1 for a resident page; the other bits are reserved.
    return bytes(present).translate(_LOWEST_BIT).count(1) * mmap.PAGESIZE


def discard(storage: Tensor) -> None:
    """Free the whole pages of a CPU tensor. Freed pages read as zeros, and take memory again after a write.

    Args:
        storage: contiguous tensor in private memory.
    """
    start, size = _whole_pages(storage)
    _call("madvise", start, size, mmap.MADV_DONTNEED)


def return_free_memory() -> None:
    """Return free memory from the allocator to the operating system."""
    ctypes.CDLL(None).malloc_trim(0)


_LOWEST_BIT = bytes(value & 1 for value in range(256))


def _whole_pages(storage: Tensor) -> tuple[int, int]:
    """Return the first address and the size of the pages completely inside the tensor."""
    assert storage.is_contiguous() and storage.device.type == "cpu"
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return begin, max(end - begin, 0)


def _call(function: str, start: int, size: int, argument: int | ctypes.Array[ctypes.c_ubyte]) -> None:
    if not size:
        return
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(ctypes.c_void_p(start), ctypes.c_size_t(size), argument):
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
