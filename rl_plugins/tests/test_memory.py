"""Freed memory: measured by the kernel's account of this process, not by the size of the request."""

from __future__ import annotations

import psutil
import pytest
import torch

from rl_plugins.memory import MemoryChange, MemoryNotFreed, discard, resident_bytes
from rl_plugins.weights.layout import Piece, SharedMemory, gaps, map_shared

MIB = 2**20
SIZE = 64 * MIB


def test_discard_frees_memory_until_the_next_write() -> None:
    values = torch.empty(SIZE, dtype=torch.uint8).fill_(7)
    assert resident_bytes(values) > SIZE - 8192
    before = psutil.Process().memory_info().rss
    discard(values)
    assert before - psutil.Process().memory_info().rss > 0.9 * SIZE
    assert resident_bytes(values) == 0
    # Whole pages only: a tensor on a page with other data stays.
    assert values.sum() <= 7 * 8192
    discard(values)
    values[SIZE // 2 : SIZE // 2 + 10000] = 3
    assert 10000 <= resident_bytes(values) <= 10000 + 2 * 4096 or resident_bytes(values) >= SIZE // 2
    assert values[SIZE // 2 : SIZE // 2 + 10000].eq(3).all()


def test_discard_keeps_less_than_a_page() -> None:
    values = torch.full((100,), 5, dtype=torch.uint8)
    discard(values)
    assert resident_bytes(values) == 0 and values.eq(5).all()


@pytest.mark.parametrize("size", [SIZE, 5 * 4096 + 17])
def test_shared_memory_give_back_frees_the_memory_of_every_mapping(size: int) -> None:
    memory = SharedMemory(size)
    other = map_shared(memory.fd, size)
    assert memory.resident_bytes == 0
    memory.bytes.fill_(9)
    assert memory.resident_bytes >= size and other.eq(9).all()
    memory.give_back()
    assert memory.resident_bytes == 0
    assert not other.any()
    other[-1] = 4
    assert memory.bytes[-1] == 4
    memory.close()


def test_gaps_are_the_bytes_that_no_piece_covers() -> None:
    memory = SharedMemory(100)
    pieces = [Piece("b", 0, 5, 40, "float32"), Piece("a", 0, 10, 4, "uint8"), Piece("a", 10, 3, 14, "bfloat16")]
    assert list(gaps(pieces, memory)) == [(0, 4), (20, 40), (60, 100)]
    assert list(gaps([Piece("c", 0, 25, 0, "float32")], memory)) == []


def test_memory_change_check_names_the_phase_and_the_bytes_that_were_not_freed() -> None:
    MemoryChange(before=1000 * MIB, after=95 * MIB, expected=1000 * MIB).check("sleep")
    MemoryChange(before=10 * MIB, after=11 * MIB, expected=0).check("nothing to give")
    with pytest.raises(
        MemoryNotFreed,
        match=r"phase 'sleep' freed 500 MiB instead of 1000 MiB: "
        r"1200 MiB were in use before the phase, 700 MiB after it",
    ):
        MemoryChange(before=1200 * MIB, after=700 * MIB, expected=1000 * MIB).check("sleep")
    total = MemoryChange.total([MemoryChange(5, 3, 2), MemoryChange(7, 1, 6)])
    assert total == MemoryChange(12, 4, 8)
