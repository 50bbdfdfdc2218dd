"""Points in a run's metrics file, but not yet in the MLflow store.

During an outage of the store, the metrics file keeps the points. The store receives the points of a metric in the order
of the file. So a metric's last step in the store shows where its missing points begin, also to another process, and
also if a resumed run repeats steps: no point is lost, and no point is sent twice.

A roll-back repeats steps with other values. The new values are sent too: the store then has both values, each with its
time. After a roll-back, a metric's last step in the store does not show how many repeated points the store has, until
the metric passes the step before the roll-back. Another process sends the repeated points again, and MLflow's database
keeps equal points once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rl_plugins.run_folder import parse_row

MAX_BATCH = 1000
"""MLflow's limit on the number of points in one request."""

_READ_BYTES = 2**16
_ROLLBACKS = "guard/rollbacks"
"""Metric of `DivergenceGuard`: logged alone in a line, at the step of the restored checkpoint."""
_NOT_IN_NAMES = re.compile(r"[^\w/. -]+")
_MAX_NAME = 250
"""MLflow's limit on the length of a name."""
_DIGEST_LENGTH = 8
FIRST_CHARTS = {
    "train/reward": "reward",
    "val/reward": "reward_validation",
    "train/response_length": "response_length",
    "train/kl": "kl",
    "train/entropy": "entropy",
    "train/rollout_gap": "rollout_gap",
    "idle/engine": "usage_idle_engine",
    "idle/trainer": "usage_idle_trainer",
    "memory/rollout": "usage_memory_rollout",
    "memory/update_policy": "usage_memory_update_policy",
}
"""Second names in MLflow: its page shows the charts of names without a slash before all others, by name."""


def name_in_mlflow(name: str) -> str:
    """Return a name that MLflow takes for a metric or a parameter.

    A name is like the path of a file: without other characters, without empty parts, `.` and `..`, and not too long. A
    part of a name can come from data, such as the data source `hf://datasets/math`.
    """
    parts = _NOT_IN_NAMES.sub("_", name).split("/")
    path = "/".join(part for part in parts if part.strip(".")).lstrip(".") or "_"
    if len(path) <= _MAX_NAME:
        return path
    return f"{path[: _MAX_NAME - _DIGEST_LENGTH - 1]}-{sha256(name.encode()).hexdigest()[:_DIGEST_LENGTH]}"


@dataclass(frozen=True)
class Point:
    """One value of a metric.

    Attributes:
        name: name of the metric in MLflow; see `name_in_mlflow`.
        value: value of the metric.
        step: step of the stage's clock.
        time_ms: time of the measurement in milliseconds since 1970.
    """

    name: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True)
class _Position:
    """A reading position in the metrics file.

    Attributes:
        offset: number of bytes before the position; the position is the start of a line.
        last_steps: last step of each metric before the position.
        stored_steps: for each metric with stored points behind the position: its last step in the store.
    """

    offset: int
    last_steps: Mapping[str, int]
    stored_steps: Mapping[str, int]


class UnsentMetrics:
    """Reader of the unsent points.

    Args:
        path: metrics file of `JsonLinesLogger`.

    Example:
        Reset the reader with the steps in the store, then send batches::

            unsent = UnsentMetrics(folder.metrics)
            unsent.reset(run.last_steps())
            for points in unsent.batches():
                run.log_points(points)
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.reset({})

    def reset(self, last_steps: Mapping[str, int]) -> None:
        """Read the file from its beginning, and skip the points in the store.

        Args:
            last_steps: last step of each metric in the store.
        """
        self._position, self._num_sent = _Position(0, {}, dict(last_steps)), 0

    def batches(self) -> Iterator[list[Point]]:
        """Yield at most `MAX_BATCH` points at a time, in the order of the file.

        A batch counts as sent when the caller asks for the next one. If sending fails, the next call yields the batch
        again.
        """
        while True:
            points, end = self._read(self._position)
            if end == self._position:
                return
            while batch := points[self._num_sent : self._num_sent + MAX_BATCH]:
                yield batch
                self._num_sent += len(batch)
            self._position, self._num_sent = end, 0

    def has_points(self) -> bool:
        """Return True if the file has unsent points."""
        position, num_sent = self._position, self._num_sent
        while True:
            points, end = self._read(position)
            if len(points) > num_sent or end == position:
                return len(points) > num_sent
            position, num_sent = end, 0

    def _read(self, position: _Position) -> tuple[list[Point], _Position]:
        """Return the new points of the next complete lines, and the position behind these lines."""
        if not self._path.is_file():
            return [], position
        with self._path.open("rb") as file:
            file.seek(position.offset)
            lines = file.readlines(_READ_BYTES)
        points: list[Point] = []
        end, last_steps, stored_steps = position.offset, dict(position.last_steps), dict(position.stored_steps)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            row = parse_row(line)
            if row is None:
                # A torn line, and the line is still in the file. `count_damaged_lines` counts it.
                continue
            step, time_ms = int(row.pop("step")), round(row.pop("time", 0) * 1000)
            if _ROLLBACKS in row:
                last_steps = {name: min(last, step) for name, last in last_steps.items() if name != _ROLLBACKS}
            row |= {first: row[metric] for metric, first in FIRST_CHARTS.items() if metric in row}
            for metric, value in row.items():
                name = name_in_mlflow(metric)
                if step <= last_steps.get(name, -1):
                    continue
                last_steps[name] = step
                if step > stored_steps.get(name, -1):
                    points.append(Point(name, float(value), step, time_ms))
                if step >= stored_steps.get(name, -1):
                    stored_steps.pop(name, None)
        return points, _Position(end, last_steps, stored_steps)
