"""Search for stretches of tokens in the private memory of processes, as arrays of ids or in a pickle.

`python memory_search.py PID ...` reads the stretches as JSON from stdin, and writes the number of stretches in each
process to stdout: 0 for an ended process. This is a separate program, because the calling process has the stretches in
its own memory.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

# Size of an entry of /proc/PID/pagemap.
_ENTRY_BYTES = 8


def encodings(stretch: list[int]) -> list[bytes]:
    """Return the bytes of the tokens as arrays of 8 or 4 bytes for each token, and as a pickled list."""
    packed = [b"".join(token.to_bytes(size, sys.byteorder) for token in stretch) for size in (8, 4)]
    # The first and last bytes of a pickle are left out.
    return [*packed, b"".join(pickle.dumps(token, 2)[2:-1] for token in stretch)]


def search(pid: str, wanted: list[list[bytes]]) -> int:
    """Return the number of stretches in a process. Memory shared with other processes does not count."""
    seen = set[int]()
    # Processes of Ray end at any time.
    with suppress(FileNotFoundError, ProcessLookupError):
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        if not maps:
            # A process nobody has waited for has no memory, and root owns the other two files.
            return 0
        with open(f"/proc/{pid}/mem", "rb", 0) as memory, open(f"/proc/{pid}/pagemap", "rb", 0) as pages:
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
    """Yield the resident ranges of a mapping. Large parts of a mapping are often reserved only."""
    size = os.sysconf("SC_PAGE_SIZE")
    pages.seek(start // size * _ENTRY_BYTES)
    entries = np.frombuffer(pages.read((stop - start) // size * _ENTRY_BYTES), dtype=np.uint64)
    present = np.concatenate([[False], entries >> np.uint64(63) == 1, [False]])
    edges = np.flatnonzero(present[1:] != present[:-1])
    for first, last in edges.reshape(-1, 2).tolist():
        yield start + first * size, start + last * size


def main() -> None:
    """Search, and print the counts."""
    wanted = [encodings(stretch) for stretch in json.load(sys.stdin)]
    print(json.dumps({pid: search(pid, wanted) for pid in sys.argv[1:]}))


if __name__ == "__main__":
    main()
