"""Memory that a phase gives back: taken from the process, measured, and asserted.

A phase that should free memory and silently does not is found only when a later one runs out, so each says how much it
must free (`expected`), and what it did free is measured by other means: the kernel's account of the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

_SHARE = 0.9
# The kernel's counters of a process lag behind by some pages on each of its CPUs.
_SLACK_BYTES = 16 * 2**20
_MIB = 2**20


class MemoryNotFreed(RuntimeError):
    """A phase gave back less memory than it must: names the phase, what was expected, and what was measured."""


@dataclass(frozen=True)
class MemoryChange:
    """What a process holds around a phase that gives memory back, in bytes.

    Attributes:
        before: in use before it.
        after: in use after it.
        expected: how much less there must be.
    """

    before: int
    after: int
    expected: int

    @classmethod
    def total(cls, changes: Iterable[MemoryChange]) -> MemoryChange:
        """Of several processes together."""
        parts = list(changes)
        return cls(sum(p.before for p in parts), sum(p.after for p in parts), sum(p.expected for p in parts))

    def check(self, phase: str) -> None:
        """Demand nine tenths of what was expected, for counters are not exact.

        Raises:
            MemoryNotFreed: less was given back.
        """
        freed = self.before - self.after
        if freed < _SHARE * self.expected - _SLACK_BYTES:
            raise MemoryNotFreed(
                f"phase {phase!r} gave back {freed / _MIB:.0f} MiB and should have given back "
                f"{self.expected / _MIB:.0f} MiB: {self.before / _MIB:.0f} MiB were in use before it, "
                f"{self.after / _MIB:.0f} MiB after it"
            )


def resident_bytes(storage: Tensor) -> int:
    """Bytes of the whole pages in a CPU tensor that are in memory.

    Args:
        storage: contiguous; private memory that was never written is not there.
    """
    start, size = _whole_pages(storage)
    present = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    _call("mincore", start, size, present)
    # The lowest bit says whether the page is there; the others are reserved.
    return bytes(present).translate(_LOWEST_BIT).count(1) * mmap.PAGESIZE


def discard(storage: Tensor) -> None:
    """Give back the whole pages of a CPU tensor: they read as zeros from then on, and take memory when written.

    Args:
        storage: contiguous, in private memory.
    """
    start, size = _whole_pages(storage)
    _call("madvise", start, size, mmap.MADV_DONTNEED)


def return_free_memory() -> None:
    """Give back what the process has freed and its allocator has kept for later."""
    ctypes.CDLL(None).malloc_trim(0)


_LOWEST_BIT = bytes(value & 1 for value in range(256))


def _whole_pages(storage: Tensor) -> tuple[int, int]:
    """First address and size of the pages that lie in the tensor alone."""
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
