"""What a tracking store lacks of a run's metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_plugins.callbacks.metrics_file import JsonLinesLogger
from rl_plugins.callbacks.metrics_tail import BATCH, MetricsTail


def take(tail: MetricsTail) -> list[tuple[str, int, float]]:
    return [(point.name, point.step, point.value) for points in tail.batches() for point in points]


@pytest.fixture
def log(tmp_path: Path) -> JsonLinesLogger:
    return JsonLinesLogger(tmp_path / "metrics.jsonl")


@pytest.fixture
def tail(tmp_path: Path) -> MetricsTail:
    return MetricsTail(tmp_path / "metrics.jsonl")


def test_each_point_comes_once_and_in_order(log, tail):
    assert take(tail) == [] and not tail.unsent()
    log.log_metrics({"a": 1.0, "b": 2.0}, 1)
    assert tail.unsent()
    assert take(tail) == [("a", 1, 1.0), ("b", 1, 2.0)]
    assert take(tail) == [] and not tail.unsent()
    log.log_metrics({"a": 3.0}, 2)
    assert take(tail) == [("a", 2, 3.0)]


def test_points_that_did_not_arrive_come_again(log, tail):
    log.log_metrics({"a": 1.0}, 1)
    with pytest.raises(OSError, match="away"):
        for _ in tail.batches():
            raise OSError("away")
    assert take(tail) == [("a", 1, 1.0)]


def test_another_process_sends_what_the_store_lacks_and_no_repeated_step(log, tail):
    for step in (1, 2, 3, 2, 3, 4):
        log.log_metrics({"a": float(step)}, step)
    log.log_metrics({"b": 1.0}, 2)
    tail.start_over({"a": 2})
    assert take(tail) == [("a", 3, 3.0), ("a", 4, 4.0), ("b", 2, 1.0)]


def test_a_line_that_is_being_written_waits_for_its_end(log, tail, tmp_path):
    line = json.dumps({"step": 1, "time": 5.25, "a": 1.0})
    (tmp_path / "metrics.jsonl").write_text(line)
    assert take(tail) == []
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    (points,) = tail.batches()
    assert (points[0].value, points[0].time_ms) == (1.0, 5250)


def test_a_long_file_comes_in_batches_that_the_store_takes(log, tail):
    for step in range(30):
        log.log_metrics({f"m{number}": float(step) for number in range(100)}, step)
    batches = list(tail.batches())
    assert sum(map(len, batches)) == 3000 and max(map(len, batches)) <= BATCH


def test_what_is_missing_at_the_end_of_a_long_file_is_seen(log, tail):
    for step in range(100):
        log.log_metrics({f"m{number}": float(step) for number in range(100)}, step)
    for last, missing in ((99, False), (98, True)):
        tail.start_over({f"m{number}": last for number in range(100)})
        assert tail.unsent() == missing


def test_names_are_those_that_mlflow_takes(log, tail):
    log.log_metrics({"val/mean@8": 1.0}, 1)
    assert take(tail) == [("val/mean_8", 1, 1.0)]
