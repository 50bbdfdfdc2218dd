"""Weights that are NaN or infinite become no checkpoint and no export, whichever rank has them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.errors import ConfigError, TrainingDiverged
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.callbacks.training import AfterStep, build_stage, sharded, train
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies.test_remote_learner import Learner

SAVED = "training has diverged by step 3: policy has weights that are NaN or infinite, so"


def spoil_one_weight(value: float) -> Any:
    """Return an act after a step: one update makes one weight NaN or infinite."""

    def act(trainer: Any, stage: Any) -> None:
        with torch.no_grad():
            next(stage.policy.parameters()).view(-1)[0] = value

    return act


@for_each("value", [math.nan, math.inf])
def test_policy_checkpoint_refuses_weights_of_the_last_update_that_are_not_finite(value: float, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / str(value))
    callbacks = [AfterStep([3], spoil_one_weight(value)), PolicyCheckpoint(folder.path, every=2)]
    with pytest.raises(TrainingDiverged) as error:
        train(build_stage(3), callbacks)
    newest = f"the last good checkpoint is {folder.checkpoint(2)}"
    assert f"{SAVED} checkpoint_00000003 is not written; {newest}" in str(error.value)
    assert folder.checkpoints() == [folder.checkpoint(2)] and folder.unfinished() == []


def test_policy_checkpoint_refuses_a_model_of_other_processes_whose_weights_are_not_finite(tmp_path: Path) -> None:
    stage: Any = build_stage(2)
    stage.reward_model = Learner("")
    spoil = AfterStep([2], lambda trainer, stage: setattr(stage.reward_model, "is_finite", False))
    with pytest.raises(TrainingDiverged, match=r"by step 2: reward_model has weights .* so checkpoint_00000002 is not"):
        train(stage, [spoil, PolicyCheckpoint(tmp_path, every=1)])
    assert RunFolder(tmp_path).checkpoints() == [RunFolder(tmp_path).checkpoint(1)]


def test_export_refuses_weights_that_are_not_finite(tmp_path: Path) -> None:
    stage = build_stage(1)
    train(stage, [])
    stage.export(tmp_path / "policy")
    spoil_one_weight(math.nan)(None, stage)
    with pytest.raises(TrainingDiverged, match=r"by step 1: policy has weights .* so other is not written"):
        stage.export(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    with pytest.raises(ConfigError, match="folder=s3://bucket/policy: an address cannot be used here"):
        stage.export(Path("s3://bucket/policy"))


def diverge(rank: int, folder: Path, strategy: str) -> str:
    acts = [AfterStep([3], spoil_last_shard)] if rank == 1 else []
    try:
        train(
            build_stage(3),
            [*acts, PolicyCheckpoint(folder, every=9)],
            strategy=sharded(strategy),
            accelerator="cpu",
            devices=1,
            num_nodes=2,
        )
    except TrainingDiverged as error:
        return str(error)
    return "saved"


def spoil_last_shard(trainer: Any, stage: Any) -> None:
    shards = [shard for _, shard in trainer.strategy.shards("policy") if shard.numel()]
    with torch.no_grad():
        shards[-1].view(-1)[-1] = math.nan


@pytest.mark.parametrize("strategy", ["zero-3", "fsdp"])
def test_check_finite_weights_stops_all_ranks_if_one_shard_is_not_finite(strategy: str, tmp_path: Path) -> None:
    outcomes = [outcome for outcome, _ in run_ranks(diverge, tmp_path, strategy)]
    assert all(SAVED in outcome for outcome in outcomes), outcomes
    assert RunFolder(tmp_path).checkpoints() == []
