"""Which of some stretches of tokens are in the private memory of processes: as ids, packed or pickled.

`python memory_search.py PID ...`: the stretches come as JSON on stdin, and for each process goes to stdout how many of
them it has. A program of its own, so that who asks does not have them.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

# Of /proc/PID/pagemap.
_ENTRY_BYTES = 8


def encodings(stretch: list[int]) -> list[bytes]:
    """How the tokens lie in memory, in arrays of 8 or 4 bytes each, or in a pickled list."""
    packed = [b"".join(token.to_bytes(size, sys.byteorder) for token in stretch) for size in (8, 4)]
    # Without what begins and ends a pickle.
    return [*packed, b"".join(pickle.dumps(token, 2)[2:-1] for token in stretch)]


def search(pid: str, wanted: list[list[bytes]]) -> int:
    """How many of the stretches a process has; memory that it shares with others is not its own."""
    seen = set()
    with (
        open(f"/proc/{pid}/maps") as maps,
        open(f"/proc/{pid}/mem", "rb", 0) as memory,
        open(f"/proc/{pid}/pagemap", "rb", 0) as pages,
    ):
        for line in maps:
            bounds, rights = line.split()[:2]
            if rights != "rw-p":
                continue
            for start, stop in _resident(pages, *(int(bound, 16) for bound in bounds.split("-"))):
                memory.seek(start)
                data = memory.read(stop - start)
                seen |= {number for number, forms in enumerate(wanted) if any(form in data for form in forms)}
    return len(seen)


def _resident(pages: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The stretches of a mapping that it has memory for: most of it is often but reserved."""
    size = os.sysconf("SC_PAGE_SIZE")
    pages.seek(start // size * _ENTRY_BYTES)
    entries = np.frombuffer(pages.read((stop - start) // size * _ENTRY_BYTES), dtype=np.uint64)
    present = np.concatenate([[False], entries >> np.uint64(63) == 1, [False]])
    edges = np.flatnonzero(present[1:] != present[:-1])
    for first, last in edges.reshape(-1, 2).tolist():
        yield start + first * size, start + last * size


def main() -> None:
    """Search and print."""
    wanted = [encodings(stretch) for stretch in json.load(sys.stdin)]
    print(json.dumps({pid: search(pid, wanted) for pid in sys.argv[1:]}))


if __name__ == "__main__":
    main()
