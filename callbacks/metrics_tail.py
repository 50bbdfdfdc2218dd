"""The points of a run's metrics file that a tracking store does not have yet: the file is the spool of an outage.

A store takes points in the order of the file, so what it has of a metric ends where its last step stands, and all
behind it is missing: after an outage, in another process, and where a resumed run makes steps again. So no point is
lost and none is sent twice. A roll-back gives steps other values, which are sent as well: a store has both, each with
its time. Until a metric has passed the step from which the run was rolled back, its last step does not tell how much
the store has of these: another process sends them again, and MLflow's database keeps equal points once.
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
_ROLLBACKS = "guard/rollbacks"
"""What `DivergenceGuard` logs, and nothing with it, at the step to which it has rolled back."""
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


@dataclass(frozen=True)
class _Place:
    """Where reading stands in the file.

    Attributes:
        offset: behind whole lines.
        last: the last step of each metric up to there.
        known: of a metric that the store has up to a step which is not reached yet, that step.
    """

    offset: int
    last: Mapping[str, int]
    known: Mapping[str, int]


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
        self._place, self._taken = _Place(0, {}, dict(last_steps)), 0

    def batches(self) -> Iterator[list[Point]]:
        """At most `BATCH` points at a time, in order; asking for more says that the store has taken the last ones."""
        while True:
            points, behind = self._read(self._place)
            if behind == self._place:
                return
            while batch := points[self._taken : self._taken + BATCH]:
                yield batch
                self._taken += len(batch)
            self._place, self._taken = behind, 0

    def unsent(self) -> bool:
        """Whether the file has points that the store has not taken."""
        place, taken = self._place, self._taken
        while True:
            points, behind = self._read(place)
            if len(points) > taken or behind == place:
                return len(points) > taken
            place, taken = behind, 0

    def _read(self, place: _Place) -> tuple[list[Point], _Place]:
        """New points of the next whole lines from there, and where these end."""
        if not self._path.is_file():
            return [], place
        with self._path.open("rb") as file:
            file.seek(place.offset)
            lines = file.readlines(_READ_BYTES)
        points: list[Point] = []
        end, last, known = place.offset, dict(place.last), dict(place.known)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            row = json.loads(line)
            step, time_ms = int(row.pop("step")), round(row.pop("time") * 1000)
            if _ROLLBACKS in row:
                last = {name: min(reached, step) for name, reached in last.items() if name != _ROLLBACKS}
            for metric, value in row.items():
                name = _NOT_IN_NAMES.sub("_", metric)
                if step <= last.get(name, -1):
                    continue
                last[name] = step
                if step > known.get(name, -1):
                    points.append(Point(name, float(value), step, time_ms))
                if step >= known.get(name, -1):
                    known.pop(name, None)
        return points, _Place(end, last, known)
