"""Time and memory of an RL step by named phase, measured on every rank.

Phases do not nest, so no second belongs to two phases. Some work of a step is in no phase. A rollout phase of
`rollout_phases` is several phases of the log.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

GIB = 2**30


@dataclass
class _Phase:
    seconds: float = 0.0
    peak_bytes: int = 0


@dataclass
class PhaseLog:
    """Time and memory of phases since the last `drain`."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    current: str | None = None
    _phases: dict[str, _Phase] = field(default_factory=dict)
    _noted: dict[str, int] = field(default_factory=dict)
    _process: psutil.Process = field(default_factory=psutil.Process)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time in the context to phase `name`, and record the peak memory (on CPU, the memory at the end)."""
        assert self.current is None, f"phase {name!r} began inside {self.current!r}"
        self.current = name
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        try:
            yield
        finally:
            if cuda:
                torch.cuda.synchronize(self.device)
            phase = self._phases.setdefault(name, _Phase())
            phase.seconds += time.perf_counter() - start
            peak = int(torch.cuda.max_memory_allocated(self.device)) if cuda else self.bytes_in_use()
            phase.peak_bytes = max(phase.peak_bytes, peak)
            self.current = None

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase since the last `drain`."""
        return self._phases[name].seconds if name in self._phases else 0.0

    def note(self, name: str, nbytes: int) -> None:
        """Keep the largest number of bytes noted under `name`, for the metric `memory/<name>`."""
        self._noted[name] = max(nbytes, self._noted.get(name, 0))

    def bytes_in_use(self) -> int:
        """Return the bytes of device memory in use by this process; on CPU, resident memory without shared memory."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device))
        memory = self._process.memory_info()
        # Weights in shared memory, which this process writes, belong to the rollout engine.
        return int(memory.rss - memory.shared)

    def drain(self) -> dict[str, float]:
        """Return `time/<phase>` in seconds and `memory/<phase>` in GiB, and clear the log.

        Memory is the device's peak. On CPU, memory is the resident memory without shared memory at the end of the
        phase. Bytes of `note` are returned as `memory/<name>` in GiB.
        """
        metrics: dict[str, float] = {}
        for name, phase in self._phases.items():
            metrics[f"time/{name}"] = phase.seconds
            metrics[f"memory/{name}"] = phase.peak_bytes / GIB
        metrics |= {f"memory/{name}": nbytes / GIB for name, nbytes in self._noted.items()}
        self._phases.clear()
        self._noted.clear()
        return metrics
