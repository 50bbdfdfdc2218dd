"""Private and shared memory of a recipe's processes over time, as the kernel counts it, to compare with a plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.watch_thread import WatchThread

KINDS = ("RayTrainWorker", "VLLMActor")
OTHERS = "others"
_EVERY_S = 0.02
_LOOK_S = 1.0


@dataclass
class Resident:
    """Measurements of each process by kind and id: time, private bytes and shared bytes."""

    seen: dict[tuple[str, int], list[tuple[float, int, int]]] = field(default_factory=dict)

    def peak(self, kind: str, start: float, end: float, *, shared: bool = False) -> int:
        """Return the peak bytes of a process of a kind between two times: the mean over the processes of this kind.

        Args:
            kind: one of `KINDS`.
            start: start by `time.time`.
            end: end by `time.time`.
            shared: True to count shared memory as well.
        """
        peaks = [
            max(private + (of_all if shared else 0) for when, private, of_all in points if start <= when <= end)
            for (name, _), points in self.seen.items()
            if name == kind and any(start <= when <= end for when, _, _ in points)
        ]
        return sum(peaks) // len(peaks)

    def others(self, start: float, end: float) -> int:
        """Return the sum of the peak bytes of all other processes of the run."""
        return sum(
            max((private for when, private, _ in points if start <= when <= end), default=0)
            for (name, _), points in self.seen.items()
            if name == OTHERS
        )


class ResidentWatch(WatchThread):
    """Measures the descendants of a process: fifty times a second, or once a second for other kinds."""

    def __init__(self, pid: int) -> None:
        super().__init__(_EVERY_S)
        self._root = psutil.Process(pid)
        self.resident = Resident()
        self._looked, self._close = 0.0, set[tuple[str, int]]()

    def measure(self) -> None:
        """Measure once."""
        if time.time() - self._looked > _LOOK_S:
            self._looked = time.time()
            self._close = self._look()
        for process in self._close:
            self._note(process)

    def _look(self) -> set[tuple[str, int]]:
        """Return the processes with a kind, and measure all other processes."""
        close: set[tuple[str, int]] = set()
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return close
        for process in processes:
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            kind = next((kind for kind in KINDS if kind in title), OTHERS)
            if kind == OTHERS:
                self._note((OTHERS, process.pid))
            else:
                close.add((kind, process.pid))
        return close

    def _note(self, process: tuple[str, int]) -> None:
        try:
            lines = Path(f"/proc/{process[1]}/status").read_text().splitlines()
        except OSError:
            return
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
        if sizes:
            point = time.time(), sizes["RssAnon"], sizes["RssShmem"]
            self.resident.seen.setdefault(process, []).append(point)
