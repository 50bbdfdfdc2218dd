"""What a tracking store lacks of a run's metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rl_plugins.callbacks import metrics_tail
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.divergence_guard import DivergenceGuard
from rl_plugins.callbacks.guard_bounds import Bounds
from rl_plugins.callbacks.metrics_file import JsonLinesLogger
from rl_plugins.callbacks.metrics_tail import BATCH, MetricsTail
from rl_plugins.run_folder import metric_rows
from rl_plugins.tests.callbacks.training import alter, build_stage, train


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


def log_rolled_back(log: JsonLinesLogger) -> list[tuple[str, int, float]]:
    """Steps 1 to 5, rolled back to 2, killed at 4 and resumed from 3, to 5 again; the points that count or did."""
    steps = [(step, float(step)) for step in range(1, 5)]
    again = [(step, 10.0 * step) for step in (3, 4, 5)]
    for step, value in [*steps, (5, math.inf)]:
        log.log_metrics({"a": value}, step)
    log.log_metrics({"guard/rollbacks": 1.0}, 2)
    for step, value in [*again[:2], *again[1:]]:
        log.log_metrics({"a": value}, step)
    points = [("a", step, value) for step, value in [*steps, (5, math.inf), *again]]
    return [*points[:5], ("guard/rollbacks", 2, 1.0), *points[5:]]


def test_steps_after_a_roll_back_are_sent_as_well(log, tail):
    assert take(tail) == [] and log_rolled_back(log) == take(tail)
    log.log_metrics({"guard/rollbacks": 1.0}, 2)
    log.log_metrics({"a": 300.0}, 3)
    assert take(tail) == [("guard/rollbacks", 2, 1.0), ("a", 3, 300.0)]


@pytest.mark.parametrize("taken", range(10))
def test_another_process_goes_on_after_a_roll_back(log, tail, taken):
    points = log_rolled_back(log)
    tail.start_over(
        {name: max(step for other, step, _ in points[:taken] if other == name) for name, *_ in points[:taken]}
    )
    missing, sent = points[taken:], take(tail)
    assert [point for point in sent if point in missing] == missing
    # Only of what a roll-back made anew is not known how much there is, until its last step is passed.
    assert all(point in points[6:taken] for point in sent if point not in missing)
    tail.start_over({"a": 5, "guard/rollbacks": 2})
    log.log_metrics({"a": 60.0}, 6)
    assert tail.unsent()
    tail.start_over({"a": 6, "guard/rollbacks": 2})
    assert not tail.unsent()


def test_a_roll_back_inside_of_what_did_not_arrive(log, tail, monkeypatch):
    monkeypatch.setattr(metrics_tail, "BATCH", 4)
    points = log_rolled_back(log)
    came: list[metrics_tail.Point] = []
    with pytest.raises(OSError, match="away"):
        for batch in tail.batches():
            if came:
                raise OSError("away")
            came += batch
    assert len(came) == 4 and take(tail) == points[4:]


def test_a_store_has_both_values_of_a_step_once(log, tail, run):
    log_rolled_back(log)
    for _ in range(2):
        for batch in tail.batches():
            run.log_points(batch)
        tail.start_over(run.last_steps())
    history = [(point.step, point.value) for point in run.client.get_metric_history(run.run_id, "a")]
    assert sorted(history)[:6] == [(1, 1), (2, 2), (3, 3), (3, 30), (4, 4), (4, 40)] and len(history) == 8


def test_a_guard_marks_its_roll_back(log, tail, tmp_path):
    stage = build_stage(4)
    alter(stage, {3: {"train/gradient_norm": math.nan}})
    guard = DivergenceGuard(Bounds(), action="roll_back", folder=tmp_path)
    train(stage, [guard, PolicyCheckpoint(tmp_path, every=2)], loggers=[log])
    points = take(tail)
    assert [step for name, step, _ in points if name == "train/loss"] == [1, 2, 3, 3, 4]
    assert len(points) == sum(len(row) - 2 for row in metric_rows(tmp_path / "metrics.jsonl"))


def test_a_line_that_is_being_written_waits_for_its_end(log, tail, tmp_path):
    line = json.dumps({"step": 1, "time": 5.25, "a": 1.0})
    (tmp_path / "metrics.jsonl").write_text(line)
    assert take(tail) == []
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    (points,) = tail.batches()
    assert (points[0].value, points[0].time_ms) == (1.0, 5250)


@pytest.mark.parametrize("whole", [0, 1])
def test_a_line_that_was_never_written_to_its_end_makes_room_for_the_next(log, tail, tmp_path, whole):
    file = tmp_path / "metrics.jsonl"
    for step in range(whole):
        log.log_metrics({"a": 0.0}, step)
    with file.open("a") as written:
        written.write('{"step": 7, "time": 5.25, "a')
    assert len(take(tail)) == len(metric_rows(file)) == whole
    log.log_metrics({"a": 8.0}, 8)
    assert take(tail) == [("a", 8, 8.0)]
    assert [row["step"] for row in metric_rows(file)] == [*range(whole), 8]


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
