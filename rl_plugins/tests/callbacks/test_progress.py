"""Progress of a run: lines in a file, a bar in a terminal, and the line about dropped prompts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from rl_plugins.callbacks import progress
from rl_plugins.callbacks.progress import Bar, DataReport, Lines, Progress, StepProgress
from rl_plugins.stages.stage import Stage
from rl_plugins.tests.patience import wait_until


class Clock(Stage):
    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.step, self.stale_metrics = 0, set()


def trainer_of(**metrics: float) -> Any:
    return SimpleNamespace(
        is_global_zero=True,
        strategy=SimpleNamespace(phase_log=SimpleNamespace(current="rollout"), model_engine=None),
        callback_metrics={name.replace("_", "/", 1): torch.tensor(value) for name, value in metrics.items()},
    )


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Function to set the clock of the progress; no time passes between two calls."""

    def set_time(seconds: float) -> None:
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: seconds))

    set_time(0.0)
    return set_time


def test_lines_are_ten_seconds_apart_while_steps_end(
    at: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(100, "grpo")
    for second in range(1, 26):
        at(second)
        lines.show(Progress(second, "reward 0.5", 1.0, "rollout"))
    assert capsys.readouterr().out == (
        "grpo: step 10 of 100, reward 0.5, 1 s/step, 0:01:30 left, in rollout\n"
        "grpo: step 20 of 100, reward 0.5, 1 s/step, 0:01:20 left, in rollout\n"
    )


def test_lines_of_a_long_step_are_a_minute_apart(
    at: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(100, "grpo")
    for second in range(1, 200):
        at(second)
        lines.show(Progress(3, "", None, "rollout"))
    assert capsys.readouterr().out == "grpo: step 3 of 100, in rollout\n" * 4


def test_lines_close_writes_the_last_step_once(at: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(2, "sft")
    lines.show(Progress(1, "", None, None))
    lines.close(Progress(2, "loss 0.1", 0.5, None))
    lines.close(Progress(2, "loss 0.1", 0.5, None))
    assert capsys.readouterr().out == "sft: step 2 of 2, loss 0.1, 0.5 s/step\n"


def test_lines_close_writes_newer_metrics_of_the_last_step(
    at: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(2, "grpo")
    at(11)
    lines.show(Progress(2, "reward 0.1", 5.5, "rollout"))
    lines.close(Progress(2, "reward 0.1, val 0.2", 5.5, None))
    assert capsys.readouterr().out.splitlines()[1:] == ["grpo: step 2 of 2, reward 0.1, val 0.2, 5.5 s/step"]


@pytest.mark.parametrize("error", [None, RuntimeError("lost")])
def test_step_progress_writes_the_last_step_and_ends_the_thread(
    error: Exception | None, at: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    callback, trainer, stage = (
        StepProgress(3, label="grpo", in_ray=False, every_s=0),
        trainer_of(train_reward=0.5),
        Clock(),
    )
    at(100.0)
    callback.on_train_start(trainer, stage)
    for stage.step in (1, 2, 3):
        callback.on_train_batch_end(trainer, stage, None, None, 0)
    thread = callback._thread
    assert thread is not None and thread.is_alive()
    if error is None:
        callback.on_train_end(trainer, stage)
    else:
        callback.on_exception(trainer, stage, error)
    assert not thread.is_alive()
    callback.teardown(trainer, stage, "fit")
    out = capsys.readouterr().out
    assert out.startswith("grpo: step 3 of 3, reward 0.5, ") and out.count("\n") == 1


def test_step_progress_shows_the_phase_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    callback, trainer, stage = StepProgress(3, label="grpo", in_ray=False, every_s=0.01), trainer_of(), Clock()
    callback.on_train_start(trainer, stage)
    shown: list[str] = []

    def rollout_is_shown() -> bool:
        shown.append(capsys.readouterr().err)
        return "grpo rollout" in "".join(shown)

    wait_until(rollout_is_shown, "the phase rollout", state=lambda: "".join(shown))
    trainer.strategy.phase_log.current = "update_policy"
    callback.on_train_end(trainer, stage)
    assert "grpo update_policy" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [80, 200])
def test_bar_shows_the_time_left_and_the_metrics_that_fit(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (columns, 24))
    # Hardly any time goes by between two looks at the clock.
    ticks = count()
    monkeypatch.setattr("tqdm.std.time", lambda: 1e-6 * next(ticks))
    bar = Bar(150, "grpo", 0, in_ray=False)
    metrics = "reward 0.123, kl 0.0123, val 0.625, loss 0.00123, ppo_kl 0.000123, trainer idle 0.223"
    bar.close(Progress(100, metrics, 1.0, "update_policy"))
    last = capsys.readouterr().err.rstrip().rpartition("\r")[2]
    assert len(last) <= columns and last.startswith("grpo update_policy, reward 0.123")
    assert "100/150 [00:00<00:00, " in last
    assert ("trainer idle" in last) == (columns == 200)


@pytest.mark.parametrize("is_global_zero", [True, False])
def test_data_report_prints_dropped_prompts_on_rank_0_only(
    is_global_zero: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = SimpleNamespace(dropped_prompts={"train": 3, "validation": 0}, dropped_images={"train": 1, "validation": 2})
    trainer: Any = SimpleNamespace(is_global_zero=is_global_zero, datamodule=data)
    DataReport("run").on_train_start(trainer, LightningModule())
    expected = [
        "run: train: 3 prompts are longer than the limit and are left out",
        "run: train: 1 prompts have bad images and are left out",
        "run: validation: 2 prompts have bad images and are left out",
    ]
    assert capsys.readouterr().out.splitlines() == (expected if is_global_zero else [])


def test_data_report_prints_nothing_without_a_data_module(capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = SimpleNamespace(is_global_zero=True, datamodule=None)
    DataReport("run").on_train_start(trainer, LightningModule())
    assert capsys.readouterr().out == ""
