"""The points of a run's metrics file that a tracking store does not have yet: the file is the spool of an outage.

A store takes points in the order of the file, so what it has of a metric ends at one step, and all above it is missing:
after an outage, in another process, and where a resumed run repeats steps. So no point is lost and none is sent twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

BATCH = 1000
"""Most points that MLflow takes at once."""

_READ_BYTES = 2**16
_NOT_IN_NAMES = re.compile(r"[^\w/. -]+")


@dataclass(frozen=True)
class Point:
    """One value of a metric.

    Attributes:
        name: of the metric, in characters that MLflow takes.
        value: its value.
        step: of the stage's clock.
        time_ms: when it was measured, since 1970.
    """

    name: str
    value: float
    step: int
    time_ms: int


class MetricsTail:
    """Reads on where the store's knowledge ends.

    Args:
        path: a file of `JsonLinesLogger`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.start_over({})

    def start_over(self, last_steps: Mapping[str, int]) -> None:
        """From the beginning, leaving out what the store has: the last step of each metric."""
        self._offset, self._last = 0, dict(last_steps)

    def batches(self) -> Iterator[list[Point]]:
        """At most `BATCH` points at a time, in order; asking for more says that the store has taken the last ones."""
        while True:
            points, end = self._read(self._offset)
            if end == self._offset:
                return
            for first in range(0, len(points), BATCH):
                taken = points[first : first + BATCH]
                yield taken
                self._last |= {point.name: point.step for point in taken}
            self._offset = end

    def unsent(self) -> bool:
        """Whether the file has points that the store has not taken."""
        start = self._offset
        while True:
            points, end = self._read(start)
            if points or end == start:
                return bool(points)
            start = end

    def _read(self, start: int) -> tuple[list[Point], int]:
        """New points of the next whole lines from there, and where these end."""
        if not self._path.is_file():
            return [], start
        with self._path.open("rb") as file:
            file.seek(start)
            lines = file.readlines(_READ_BYTES)
        points: list[Point] = []
        end, last = start, dict(self._last)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            row = json.loads(line)
            step, time_ms = int(row.pop("step")), round(row.pop("time") * 1000)
            for metric, value in row.items():
                name = _NOT_IN_NAMES.sub("_", metric)
                if step > last.get(name, -1):
                    points.append(Point(name, float(value), step, time_ms))
                    last[name] = step
        return points, end
