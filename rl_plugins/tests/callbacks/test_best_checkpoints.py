"""The best checkpoints are kept beside the newest ones, also when the process dies at any moment."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from rl_plugins.callbacks import checkpoint_files
from rl_plugins.callbacks.best_checkpoints import BestCheckpoints, ranked_bests
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.callbacks.training import AfterStep, alter, build_stage, train, weights
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned

REWARDS = [0.1, 0.5, 0.3, 0.5, 0.9, math.nan]
STEPS = len(REWARDS)


def rewarded(steps: int = STEPS) -> Any:
    stage = build_stage(steps)
    alter(stage, {step: {"train/reward": reward} for step, reward in enumerate(REWARDS, start=1)})
    return stage


def stop(trainer: Trainer, stage: Any) -> None:
    raise InterruptedError


def steps_of(paths: list[Path]) -> list[int]:
    return [int(path.name[-8:]) for path in paths]


@pytest.fixture(scope="module")
def final_weights(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    """Weights after all steps without an interruption."""
    whole = build_stage(STEPS)
    train(whole, [PolicyCheckpoint(tmp_path_factory.mktemp("whole"), every=99)])
    return weights(whole)


@pytest.mark.parametrize(
    ("mode", "keep", "best"), [("max", 2, [2, 5]), ("min", 2, [1, 3]), ("max", 9, [1, 2, 3, 4, 5])]
)
def test_best_checkpoints_keep_the_best_steps_by_a_training_metric(
    tmp_path: Path, final_weights: list[Tensor], mode: str, keep: int, best: list[int]
) -> None:
    folder = RunFolder(tmp_path)
    keeper = BestCheckpoints(tmp_path, metric="train/reward", mode=mode, keep=keep)
    train(rewarded(), [PolicyCheckpoint(tmp_path, every=1, keep_last=1), keeper])
    assert steps_of(folder.checkpoints()) == [STEPS]
    assert steps_of(folder.bests()) == best
    # A run goes on from one of the best as from any checkpoint.
    resumed = build_stage(STEPS, seed=9)
    train(resumed, [PolicyCheckpoint(tmp_path / "other", every=99)], resume=folder.best(best[0]))
    assert all(torch.equal(*pair) for pair in zip(weights(resumed), final_weights, strict=True))


def test_best_checkpoints_share_files_with_a_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    keeper = BestCheckpoints(tmp_path, metric="train/reward")
    train(rewarded(2), [PolicyCheckpoint(tmp_path, every=1, keep_last=9), keeper])
    folder = RunFolder(tmp_path)
    assert os.path.samefile(folder.best(2) / "state", folder.checkpoint(2) / "state")


def fit(folder: RunFolder, stage: Any, *callbacks: Callback, every: int, resume: Path | None = None) -> None:
    """Train with a validation after every second step."""
    checkpoints = [PolicyCheckpoint(folder.path, every=every), BestCheckpoints(folder.path, keep=2)]
    trainer = Trainer(
        strategy=SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()), logger=False, max_epochs=-1,
        callbacks=[*checkpoints, *callbacks], val_check_interval=2, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, check_val_every_n_epoch=None,
    )  # fmt: skip
    batch = canned.prompt_batch(canned.PROMPTS)
    state = None if resume is None else resume / "state"
    trainer.fit(stage, canned.loader([batch] * 9), canned.loader([batch]), ckpt_path=state, weights_only=True)


def test_best_checkpoints_save_after_a_validation_between_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    fit(folder, build_stage(4), every=3)
    assert steps_of(folder.checkpoints()) == [3, 4] and steps_of(folder.bests()) == [2, 4]


@for_each("killed_step", [2, 4])
def test_best_checkpoints_consider_a_step_whose_validation_was_killed(tmp_path: Path, killed_step: int) -> None:
    class Killed(Callback):
        def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any) -> None:
            if pl_module.step == killed_step:
                raise InterruptedError

    folder = RunFolder(tmp_path / str(killed_step))
    with pytest.raises(InterruptedError):
        fit(folder, build_stage(4), Killed(), every=2)
    newest = folder.checkpoint(killed_step)
    assert folder.latest_checkpoint() == newest and not folder.best(killed_step).exists()
    resumed = build_stage(4, seed=9)
    resumed.validate_first = True
    fit(folder, resumed, every=2, resume=newest)
    assert resumed.step == 4 and steps_of(folder.bests()) == [2, 4]
    assert os.path.samefile(folder.best(killed_step) / "state", newest / "state")


def test_best_checkpoints_replace_a_step_that_a_resumed_run_repeats_with_a_better_metric(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    best = folder.best(2)
    best.mkdir()
    for earlier, kept in ((0.6, 0.6), (0.4, 0.5)):
        (best / "metric.json").write_text(json.dumps({"train/reward": earlier}))
        keeper = BestCheckpoints(tmp_path, metric="train/reward", keep=9)
        train(rewarded(2), [PolicyCheckpoint(tmp_path, every=2), keeper])
        assert json.loads((best / "metric.json").read_text()) == {"train/reward": kept}
        shutil.rmtree(folder.checkpoint(2))
    assert (best / "state").exists()


def test_best_checkpoints_leave_a_copied_best_checkpoint_intact(tmp_path: Path) -> None:
    """A new run continues from the best checkpoint of another run."""
    first, branch = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "branch")
    fit(first, build_stage(2), every=2)
    shutil.copytree(first.best(2), branch.checkpoint(2))
    resumed = build_stage(4, seed=9)
    resumed.validate_first = True
    fit(branch, resumed, every=2, resume=branch.checkpoint(2))
    assert steps_of(branch.bests()) == [2, 4]
    names = branch.best(2), branch.checkpoint(2)
    assert os.path.samefile(*(folder / "state" for folder in names))
    assert not os.path.samefile(*(folder / "metric.json" for folder in names))


def test_best_checkpoints_leave_out_the_step_of_the_start(tmp_path: Path) -> None:
    def roll_back(trainer: Trainer, stage: Any) -> None:
        stage.step = 2

    folder = RunFolder(tmp_path)
    train(rewarded(2), [PolicyCheckpoint(tmp_path, every=1)])
    keeper = BestCheckpoints(tmp_path, metric="train/reward")
    callbacks = [AfterStep([3], roll_back), PolicyCheckpoint(tmp_path, every=1), keeper]
    with pytest.raises(InterruptedError):
        train(rewarded(4), [*callbacks, AfterStep([2], stop)], resume=folder.checkpoint(2))
    assert folder.bests() == []


def test_best_checkpoints_leave_out_the_metrics_of_a_step_that_was_rolled_back(tmp_path: Path) -> None:
    def roll_back(trainer: Trainer, stage: Any) -> None:
        stage.step, guard.act = 4, stop

    guard, folder = AfterStep([5], roll_back), RunFolder(tmp_path)
    keeper = BestCheckpoints(tmp_path, metric="train/reward")
    with pytest.raises(InterruptedError):
        train(rewarded(), [guard, PolicyCheckpoint(tmp_path, every=2), keeper])
    assert steps_of(folder.checkpoints()) == [2, 4] and steps_of(folder.bests()) == [2]


def test_best_checkpoints_leave_out_steps_without_the_metric(tmp_path: Path) -> None:
    """An overflow of float16 leaves out a step and its gradient norm, also in the first step."""
    stage = build_stage(4)

    class Overflowing(SingleDeviceRolloutStrategy):
        def gradient_norm(self, name: str) -> float | None:
            return {1: 0.3, 3: 0.2}.get(stage.step)

    alter(stage, {step: {"train/loss_scale": 2.0} for step in range(1, 5)})
    keeper = BestCheckpoints(tmp_path, metric="train/gradient_norm", mode="min", keep=9)
    strategy = Overflowing(rollout=canned.CannedRollout())
    train(stage, [PolicyCheckpoint(tmp_path, every=1), keeper], strategy=strategy)
    assert steps_of(RunFolder(tmp_path).bests()) == [2, 4]


def test_best_checkpoints_refuse_an_unknown_metric_by_name(tmp_path: Path) -> None:
    keeper = BestCheckpoints(tmp_path, metric="train/rewrad")
    with pytest.raises(
        ConfigError, match=r"metric='train/rewrad'.*run\.best_metric.*: there is no such metric; .* train/reward,"
    ):
        train(build_stage(2), [PolicyCheckpoint(tmp_path, every=1), keeper])


@for_each("content", ["", "[0.5]", '{"val/reward": "high"}'])
def test_ranked_bests_names_a_damaged_metric_and_the_way_out(tmp_path: Path, content: str) -> None:
    file = RunFolder(tmp_path).best(2) / "metric.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    way_out = f'move {file.parent} out of the run\'s folder, or write {{"val/reward": NUMBER}} into the file'
    with pytest.raises(ConfigError, match=f"^{re.escape(str(file))}: .*: {re.escape(way_out)}$"):
        ranked_bests(RunFolder(tmp_path), "val/reward", "max")
    file.write_text('{"train/reward": 0.5}')
    assert ranked_bests(RunFolder(tmp_path), "val/reward", "max") == [file.parent]


@pytest.mark.parametrize("deadline_s", [None, 60])
@pytest.mark.parametrize("moment", ["save_checkpoint", "replace", "rmtree"])
def test_policy_checkpoint_killed_at_any_moment_leaves_a_loadable_checkpoint(
    tmp_path: Path, moment: str, deadline_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process ends while it writes, renames or removes a checkpoint; the next process resumes and cleans up."""

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    def arm(trainer: Any, stage: Any) -> None:
        if moment == "save_checkpoint":
            monkeypatch.setattr(trainer, moment, killed)
        else:
            monkeypatch.setattr(
                getattr(checkpoint_files, {"replace": "os", "rmtree": "shutil"}[moment]), moment, killed
            )

    folder = RunFolder(tmp_path)
    options: dict[str, Any] = {"every": 1, "keep_last": 2, "background_deadline_s": deadline_s}
    with pytest.raises(Killed):
        train(build_stage(4), [AfterStep([3], arm), PolicyCheckpoint(tmp_path, **options)])
    monkeypatch.undo()
    newest = folder.latest_checkpoint()
    assert newest is not None
    resumed = build_stage(4, seed=9)
    train(resumed, [PolicyCheckpoint(tmp_path, **options)], resume=newest)
    assert resumed.step == 4 and folder.unfinished() == []
    assert steps_of(folder.checkpoints()) == [3, 4]


def test_best_checkpoints_take_the_last_step(tmp_path: Path) -> None:
    """`PolicyCheckpoint` saves the last step at the end of training."""
    train(rewarded(5), [PolicyCheckpoint(tmp_path, every=2), BestCheckpoints(tmp_path, metric="train/reward")])
    assert steps_of(RunFolder(tmp_path).bests()) == [5]
