"""A run asked to stop ends after the step with a checkpoint, and a resumed run has the same bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.graceful_stop import GracefulStop
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.callbacks.training import AfterStep, build_stage, train, weights
from rl_plugins.tests.patience import wait_until
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

STEPS = 5


def callbacks(folder: Path, *others: Any, **options: Any) -> list[Any]:
    return [*others, PolicyCheckpoint(folder, every=100), GracefulStop(folder, **options)]


def test_graceful_stop_on_sigterm_saves_and_the_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    whole = build_stage(STEPS)
    train(whole, callbacks(tmp_path / "whole"))

    folder = RunFolder(tmp_path / "broken")
    before = signal.getsignal(signal.SIGTERM)
    folder.path.mkdir()
    broken = build_stage(STEPS)
    kill = AfterStep([3], lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    made = callbacks(folder.path, kill)
    train(broken, made)
    assert broken.step == 3 and made[-1].stopped
    assert signal.getsignal(signal.SIGTERM) == before
    assert folder.stopped.read_text() == "after step 3: SIGTERM" and not folder.stop.exists()
    assert folder.checkpoints() == [folder.checkpoint(3)]

    resumed = build_stage(STEPS, seed=9)
    train(resumed, callbacks(folder.path), resume=folder.checkpoint(3))
    assert resumed.step == STEPS
    for one, other in zip(weights(resumed), weights(whole), strict=True):
        assert torch.equal(one, other)


def test_resume_of_a_finished_run_takes_no_further_step(tmp_path: Path) -> None:
    whole, again = build_stage(2), build_stage(2, seed=9)
    train(whole, [PolicyCheckpoint(tmp_path, every=1)])
    train(again, [PolicyCheckpoint(tmp_path, every=1)], resume=RunFolder(tmp_path).checkpoint(2))
    assert again.step == 2
    assert all(torch.equal(one, other) for one, other in zip(weights(again), weights(whole), strict=True))


def terminate_twice(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def test_graceful_stop_passes_a_second_sigterm_to_the_previous_handler(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        twice = AfterStep([1], terminate_twice)
        stage = build_stage(STEPS)
        # Lightning's handler comes before the earlier handler.
        with pytest.raises(SystemExit):
            train(stage, callbacks(tmp_path, twice))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM] and stage.step == 1


def test_graceful_stop_counts_the_time_limit_from_the_start_of_the_run(tmp_path: Path) -> None:
    stage = build_stage(STEPS)
    train(stage, callbacks(tmp_path, time_limit_s=50.0, started=time.time() - 60))
    assert stage.step == 1
    assert RunFolder(tmp_path).stopped.read_text() == "after step 1: the time limit of 50 s"
    stage = build_stage(STEPS)
    train(stage, callbacks(tmp_path / "other", time_limit_s=5000.0, started=time.time() - 60))
    assert stage.step == STEPS


def test_graceful_stop_skips_the_validation_after_a_stop_request(tmp_path: Path) -> None:
    def ask(trainer: Any, stage: Any) -> None:
        RunFolder(tmp_path).stop.touch()

    stage = build_stage(STEPS)
    made = callbacks(tmp_path, AfterStep([2], ask))
    from lightning.pytorch import Trainer

    from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

    rollout = canned.CannedRollout()
    trainer = Trainer(
        strategy=SingleDeviceRolloutStrategy(rollout=rollout), callbacks=made, logger=False, max_epochs=-1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    batch = canned.prompt_batch(canned.PROMPTS)
    trainer.fit(stage, canned.loader([batch] * 9), canned.loader([batch]))
    assert stage.step == 2 and rollout.calls.count("generate") == 2
    assert "asked by" in RunFolder(tmp_path).stopped.read_text()


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Path.mkdir, "asked by {}"), (partial(Path.write_bytes, data=b"\xff now"), "\ufffd now")],
    ids=["folder", "no UTF-8"],
)
def test_graceful_stop_saves_also_if_the_text_of_the_request_is_unreadable(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    folder, stage = RunFolder(tmp_path), build_stage(STEPS)
    train(stage, callbacks(tmp_path, AfterStep([2], lambda *_: make(folder.stop))))
    assert stage.step == 2 and folder.checkpoint(2).is_dir()
    assert folder.stopped.read_text(encoding="utf-8") == f"after step 2: {reason.format(folder.stop)}"
    assert not folder.stop.exists()


def test_graceful_stop_restores_the_validation_if_an_exception_follows_the_request(tmp_path: Path) -> None:
    trainers: list[Any] = []

    def fail(trainer: Any, stage: Any) -> None:
        trainers.append(trainer)
        assert trainer.limit_val_batches == 0
        raise RuntimeError("too late")

    made = callbacks(tmp_path, AfterStep([1], lambda *_: RunFolder(tmp_path).stop.touch()))
    with pytest.raises(RuntimeError, match="too late"):
        train(build_stage(STEPS), [*made, AfterStep([1], fail)], limit_val_batches=3)
    assert [trainer.limit_val_batches for trainer in trainers] == [3]


def test_graceful_stop_saves_once_for_a_notice_of_ray_train_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice = SimpleNamespace(preempted_node_ids=["node"])
    answers = iter([None, notice, notice, None, notice])
    monkeypatch.setattr("ray.train.get_preemption_info", lambda: next(answers), raising=False)
    stage = build_stage(STEPS)
    train(stage, [PolicyCheckpoint(tmp_path, every=100, keep_last=9), GracefulStop(tmp_path, ray_notices=True)])
    assert [path.name[-1] for path in RunFolder(tmp_path).checkpoints()] == ["2", "5"]


def test_graceful_stop_takes_no_step_after_a_request_during_the_start(tmp_path: Path) -> None:
    RunFolder(tmp_path).stop.write_text("SIGTERM")
    stage = build_stage(STEPS)
    train(stage, callbacks(tmp_path))
    assert stage.step == 0 and RunFolder(tmp_path).checkpoints() == []
    assert RunFolder(tmp_path).stopped.read_text() == "before the first step: SIGTERM"


@pytest.mark.usefixtures("default_signals")
def test_graceful_stop_saves_on_sighup(tmp_path: Path) -> None:
    stage = build_stage(STEPS)
    train(stage, callbacks(tmp_path, AfterStep([2], lambda *_: os.kill(os.getpid(), signal.SIGHUP))))
    assert stage.step == 2 and RunFolder(tmp_path).checkpoint(2).is_dir()
    assert RunFolder(tmp_path).stopped.read_text() == "after step 2: SIGHUP"


def test_graceful_stop_refuses_a_trainer_without_policy_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a callback needs PolicyCheckpoint: add PolicyCheckpoint to Trainer"):
        train(build_stage(STEPS), [GracefulStop(tmp_path)])


def stop_on_one_rank(rank: int, folder: Path) -> int:
    others = [] if rank == 0 else [AfterStep([2], lambda *_: os.kill(os.getpid(), signal.SIGTERM))]
    if rank == 0:
        # The request of the other rank is there when this one looks.
        others = [AfterStep([2], lambda *_: wait_until(RunFolder(folder).stop.exists, "the request of the other rank"))]
    stage = build_stage(STEPS)
    train(stage, callbacks(folder, *others), strategy=canned.AllReduceStrategy(rank, 2, rollout=canned.CannedRollout()))
    return stage.step


def test_graceful_stop_ends_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    assert [step for step, _ in run_ranks(stop_on_one_rank, tmp_path)] == [2, 2]
