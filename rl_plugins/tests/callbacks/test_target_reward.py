"""Training ends when a validation reaches the target, also if the run was killed right after that validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.target_reward import TargetReward
from rl_plugins.run_folder import RunFolder, append_metrics
from rl_plugins.tests.callbacks.training import AfterStep, build_stage, train


def test_target_reward_takes_no_further_step_after_a_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    train(build_stage(2), [PolicyCheckpoint(tmp_path, every=1)])
    append_metrics(folder.metrics, {"val/reward": 0.5}, 2)
    for target, steps in ((0.5, 2), (0.6, 4)):
        stage = build_stage(4)
        callbacks = [PolicyCheckpoint(tmp_path, every=9), TargetReward(tmp_path, target)]
        train(stage, callbacks, resume=folder.checkpoint(2))
        assert stage.step == steps, target


def test_target_reward_trains_a_step_if_the_first_policy_reaches_the_target(tmp_path: Path) -> None:
    append_metrics(RunFolder(tmp_path).metrics, {"val/reward": 0.5}, 0)
    stage = build_stage(2)
    train(stage, [PolicyCheckpoint(tmp_path, every=9), TargetReward(tmp_path, 0.4)])
    assert stage.step > 0


def test_target_reward_ends_training_at_the_validation_that_reaches_the_target(tmp_path: Path) -> None:
    def validate(trainer: Any, stage: Any) -> None:
        append_metrics(RunFolder(tmp_path).metrics, {"val/reward": 0.1 * stage.step}, stage.step)
        target.on_validation_end(trainer, stage)

    target = TargetReward(tmp_path, 0.3)
    stage = build_stage(5)
    train(stage, [AfterStep(range(1, 6), validate), target])
    assert stage.step == 3
