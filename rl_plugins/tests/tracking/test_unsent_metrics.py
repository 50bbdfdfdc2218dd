"""`UnsentMetrics`: the points of the metrics file missing in an MLflow store."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.divergence_guard import DivergenceGuard
from rl_plugins.config.run import Bounds
from rl_plugins.errors import StorageError
from rl_plugins.run_folder import count_damaged_lines, metric_rows, read_metrics
from rl_plugins.tests.callbacks.training import alter, build_stage, train
from rl_plugins.tests.cases import case
from rl_plugins.tests.files import limited_file_size
from rl_plugins.tracking import unsent_metrics
from rl_plugins.tracking.loggers import JsonLinesLogger
from rl_plugins.tracking.unsent_metrics import FIRST_CHARTS, MAX_BATCH, Point, UnsentMetrics


def take(unsent: UnsentMetrics) -> list[tuple[str, int, float]]:
    return [(point.name, point.step, point.value) for points in unsent.batches() for point in points]


@pytest.fixture
def log(tmp_path: Path) -> JsonLinesLogger:
    return JsonLinesLogger(tmp_path / "metrics.jsonl")


@pytest.fixture
def unsent(tmp_path: Path) -> UnsentMetrics:
    return UnsentMetrics(tmp_path / "metrics.jsonl")


def test_batches_give_each_point_once_and_in_order(log, unsent):
    assert take(unsent) == [] and not unsent.has_points()
    log.log_metrics({"a": 1.0, "b": 2.0}, 1)
    assert unsent.has_points()
    assert take(unsent) == [("a", 1, 1.0), ("b", 1, 2.0)]
    assert take(unsent) == [] and not unsent.has_points()
    log.log_metrics({"a": 3.0}, 2)
    assert take(unsent) == [("a", 2, 3.0)]


def test_batches_give_the_metrics_of_the_first_charts_two_names(log, unsent):
    log.log_metrics({"train/reward": 0.5, "train/lr": 0.1}, 1)
    assert take(unsent) == [("train/reward", 1, 0.5), ("train/lr", 1, 0.1), ("reward", 1, 0.5)]
    unsent.reset({"train/reward": 1, "reward": 1})
    assert take(unsent) == [("train/lr", 1, 0.1)]


def test_batches_give_the_points_of_a_failed_call_again(log, unsent):
    log.log_metrics({"a": 1.0}, 1)
    with pytest.raises(OSError, match="away"):
        for _ in unsent.batches():
            raise OSError("away")
    assert take(unsent) == [("a", 1, 1.0)]


def test_batches_give_names_that_the_store_takes(log, unsent, run):
    sources = ["hf://datasets/x", "/data/math", "math/", "a/../b", "..", "./c", "...d", "x" * 300, f"y/{'z' * 300}"]
    for step in (1, 2):
        log.log_metrics(dict.fromkeys([*sources, *(f"{source}/mean" for source in sources)], 0.5), step)
    log.log_metrics({"train/loss": 1.0}, 3)
    for points in unsent.batches():
        run.log_points(points)
    stored = run.last_steps()
    assert stored.pop("train/loss") == 3 and len(stored) == 2 * len(sources) and set(stored.values()) == {2}
    assert {"hf_/datasets/x", "data/math", "math", "math/mean", "a/b/mean", "_", "mean", "c", "d"} <= stored.keys()
    unsent.reset(run.last_steps())
    assert take(unsent) == []


def test_reset_skips_the_steps_that_the_store_has(log, unsent):
    for step in (1, 2, 3, 2, 3, 4):
        log.log_metrics({"a": float(step)}, step)
    log.log_metrics({"b": 1.0}, 2)
    unsent.reset({"a": 2})
    assert take(unsent) == [("a", 3, 3.0), ("a", 4, 4.0), ("b", 2, 1.0)]


def log_rolled_back(log: JsonLinesLogger) -> list[tuple[str, int, float]]:
    """Steps 1 to 5, rolled back to 2, killed at 4 and resumed from 3, to 5 again. Return all points."""
    steps = [(step, float(step)) for step in range(1, 5)]
    again = [(step, 10.0 * step) for step in (3, 4, 5)]
    for step, value in [*steps, (5, math.inf)]:
        log.log_metrics({"a": value}, step)
    log.log_metrics({"guard/rollbacks": 1.0}, 2)
    for step, value in [*again[:2], *again[1:]]:
        log.log_metrics({"a": value}, step)
    points = [("a", step, value) for step, value in [*steps, (5, math.inf), *again]]
    return [*points[:5], ("guard/rollbacks", 2, 1.0), *points[5:]]


def test_batches_include_steps_repeated_after_a_roll_back(log, unsent):
    assert take(unsent) == [] and log_rolled_back(log) == take(unsent)
    log.log_metrics({"guard/rollbacks": 1.0}, 2)
    log.log_metrics({"a": 300.0}, 3)
    assert take(unsent) == [("guard/rollbacks", 2, 1.0), ("a", 3, 300.0)]


def test_reset_after_a_roll_back_sends_every_missing_point(tmp_path):
    for taken in range(10):
        file = tmp_path / str(taken) / "metrics.jsonl"
        file.parent.mkdir()
        with case(f"the store has {taken} points"):
            check_reset(JsonLinesLogger(file), UnsentMetrics(file), taken)


def check_reset(log: JsonLinesLogger, unsent: UnsentMetrics, taken: int) -> None:
    """Log points with a roll-back. The store has the first points."""
    points = log_rolled_back(log)
    unsent.reset({name: max(step for other, step, _ in points[:taken] if other == name) for name, *_ in points[:taken]})
    missing, sent = points[taken:], take(unsent)
    assert [point for point in sent if point in missing] == missing
    # Points repeated after a roll-back may be sent twice, because the store does not give their number.
    assert all(point in points[6:taken] for point in sent if point not in missing)
    unsent.reset({"a": 5, "guard/rollbacks": 2})
    log.log_metrics({"a": 60.0}, 6)
    assert unsent.has_points()
    unsent.reset({"a": 6, "guard/rollbacks": 2})
    assert not unsent.has_points()


def test_batches_after_a_failed_call_with_a_roll_back_among_the_points(log, unsent, monkeypatch):
    monkeypatch.setattr(unsent_metrics, "MAX_BATCH", 4)
    points = log_rolled_back(log)
    received: list[Point] = []
    with pytest.raises(OSError, match="away"):
        for batch in unsent.batches():
            if received:
                raise OSError("away")
            received += batch
    assert len(received) == 4 and take(unsent) == points[4:]


def test_first_charts_of_mlflow_begin_with_learning_and_end_with_memory_and_idle_time(log, unsent):
    learning = ["entropy", "kl", "response_length", "reward", "reward_validation", "rollout_gap"]
    log.log_metrics(dict.fromkeys([*FIRST_CHARTS, "time/rollout", "train/loss"], 1.0), 1)
    # MLflow sorts groups by the text before the last slash, and charts in a group by name.
    charts = sorted((name for name, _, _ in take(unsent)), key=lambda name: (name.rpartition("/")[0], name))
    assert charts[:6] == learning
    usage = [name for name in charts if name.startswith("usage_")]
    assert charts[6:10] == usage and [name.split("_")[1] for name in usage] == ["idle", "idle", "memory", "memory"]


def test_store_has_both_values_of_a_repeated_step_once(log, unsent, run):
    log_rolled_back(log)
    for _ in range(2):
        for batch in unsent.batches():
            run.log_points(batch)
        unsent.reset(run.last_steps())
    history = [(point.step, point.value) for point in run.client.get_metric_history(run.run_id, "a")]
    assert sorted(history)[:6] == [(1, 1), (2, 2), (3, 3), (3, 30), (4, 4), (4, 40)] and len(history) == 8


def test_divergence_guard_marks_a_roll_back_in_the_metrics_file(log, unsent, tmp_path):
    stage = build_stage(4)
    alter(stage, {3: {"train/gradient_norm": math.nan}})
    guard = DivergenceGuard(Bounds(), action="roll_back", folder=tmp_path)
    train(stage, [guard, PolicyCheckpoint(tmp_path, every=2)], loggers=[log])
    points = [point for point in take(unsent) if point[0] not in FIRST_CHARTS.values()]
    assert [step for name, step, _ in points if name == "train/loss"] == [1, 2, 3, 3, 4]
    assert len(points) == sum(len(row) - 2 for row in metric_rows(tmp_path / "metrics.jsonl"))


def test_batches_leave_a_line_alone_until_the_end_of_the_line(log, unsent, tmp_path):
    line = json.dumps({"step": 1, "time": 5.25, "a": 1.0})
    (tmp_path / "metrics.jsonl").write_text(line)
    assert take(unsent) == []
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    (points,) = unsent.batches()
    assert (points[0].value, points[0].time_ms) == (1.0, 5250)


@pytest.mark.parametrize("whole", [0, 1])
def test_log_metrics_starts_on_a_new_line_after_a_torn_line(log, unsent, tmp_path, whole):
    file = tmp_path / "metrics.jsonl"
    for step in range(whole):
        log.log_metrics({"a": 0.0}, step)
    with file.open("a") as written:
        written.write('{"step": 7, "time": 5.25, "a')
    assert len(take(unsent)) == len(metric_rows(file)) == whole
    log.log_metrics({"a": 8.0}, 8)
    assert take(unsent) == [("a", 8, 8.0)]
    assert [row["step"] for row in metric_rows(file)] == [*range(whole), 8]
    assert count_damaged_lines(file) == 1


DAMAGED = [
    b'{"step": 7, "time": 5.25, "a', b"\x00\x00\x00", b"\xff\xfe", b"[1]", b'{"time": 1.0, "a": 1.0}', b"[" * 10_000,
    b'{"step": 1, "time": NaN}', b'{"step": 1, "time": 1.0, "a": "text"}',
]  # fmt: skip


def test_readers_leave_out_and_count_damaged_lines(log, unsent, tmp_path):
    file = tmp_path / "metrics.jsonl"
    for number, line in enumerate(DAMAGED):
        with case(repr(line[:40])):
            log.log_metrics({"a": 1.0}, 2 * number)
            with file.open("ab") as written:
                written.write(line + b"\n")
            log.log_metrics({"a": 2.0}, 2 * number + 1)
            assert take(unsent) == [("a", 2 * number, 1.0), ("a", 2 * number + 1, 2.0)] and not unsent.has_points()
            assert list(read_metrics(file)["a"]) == list(range(2 * number + 2))
            assert count_damaged_lines(file) == number + 1


def test_log_metrics_on_a_full_disk_keeps_earlier_lines(log, tmp_path):
    log.log_metrics({"a": 1.0}, 1)
    message = r"metrics\.jsonl cannot be written \(File too large\): make room"
    with pytest.raises(StorageError, match=message), limited_file_size(60):
        log.log_metrics({"a": 2.0}, 2)
    log.log_metrics({"a": 3.0}, 3)
    assert read_metrics(tmp_path / "metrics.jsonl") == {"a": {1: 1.0, 3: 3.0}}


def test_batches_of_a_long_file_are_within_the_limit_of_the_store(log, unsent):
    for step in range(30):
        log.log_metrics({f"m{number}": float(step) for number in range(100)}, step)
    batches = list(unsent.batches())
    assert sum(map(len, batches)) == 3000 and max(map(len, batches)) <= MAX_BATCH


def test_has_points_sees_missing_points_at_the_end_of_a_long_file(log, unsent):
    for step in range(100):
        log.log_metrics({f"m{number}": float(step) for number in range(100)}, step)
    for last, missing in ((99, False), (98, True)):
        unsent.reset({f"m{number}": last for number in range(100)})
        assert unsent.has_points() == missing


def test_batches_replace_characters_in_names_that_mlflow_refuses(log, unsent):
    log.log_metrics({"val/mean@8": 1.0}, 1)
    assert take(unsent) == [("val/mean_8", 1, 1.0)]
