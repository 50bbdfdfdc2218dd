"""A reference with updates from the policy is rolled back with the policy, and moves on from there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.callbacks.averages import ReferenceUpdate
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint, load_rank_states
from rl_plugins.callbacks.divergence_guard import DivergenceGuard
from rl_plugins.config.models import LoraConfig
from rl_plugins.config.run import Bounds
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.callbacks.training import AfterStep, alter, build_stage, sharded, train
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

Weights = dict[str, Tensor]
EVERY, KEEP = 3, 0.5
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}


def weights_of(trainer: Any, engine: str) -> Weights:
    return {name: tensor.clone() for name, tensor in trainer.strategy.weight_source(engine)}


def roll_back(folder: Path, strategy: Any, **options: Any) -> None:
    """The reference moves at step 3, step 4 diverges, and the newest checkpoint is the checkpoint of step 2."""
    stage = build_stage(4, policy=str(folder.parent / "policy"), algorithm=Algorithm(kl=KLConfig(0.1)))
    alter(stage, {4: {"train/gradient_norm": math.nan}})
    seen: list[tuple[int, Weights, Weights]] = []

    def look(trainer: Any, module: Any) -> None:
        seen.append((module.step, weights_of(trainer, "policy"), weights_of(trainer, "reference")))

    guard = DivergenceGuard(Bounds(), action="roll_back", folder=folder)
    update, checkpoint = ReferenceUpdate(every=EVERY, keep=KEEP), PolicyCheckpoint(folder, every=2)
    train(stage, [guard, update, checkpoint, AfterStep(range(6), look)], strategy=strategy, **options)
    steps, policies, references = zip(*seen, strict=True)
    assert steps == (1, 2, 3, 2, 3, 4)
    start = references[0]
    for name, weight in start.items():
        assert torch.equal(references[3][name], weight)
        for after in (2, 4):
            moved = torch.lerp(weight.float(), policies[after][name].float(), 1 - KEEP).to(weight.dtype)
            torch.testing.assert_close(references[after][name], moved, rtol=1e-6, atol=1e-8)
    assert not all(torch.equal(policies[2][name], policies[4][name]) for name in start)
    assert not all(torch.equal(references[4][name], weight) for name, weight in start.items())


def test_reference_update_refuses_a_policy_with_an_adapter(tmp_path: Path) -> None:
    policy = str(save_tiny_policy(tmp_path / "policy", **SIZES))
    copy = str(save_tiny_policy(tmp_path / "copy", **SIZES))
    stage = build_stage(
        1, policy=policy, algorithm=Algorithm(kl=KLConfig(0.1)), reference=copy, lora=LoraConfig(rank=2)
    )
    with pytest.raises(ConfigError, match=r"the policy has an adapter, and the reference has none"):
        train(stage, [ReferenceUpdate(every=1)])


def test_reference_update_is_undone_by_a_roll_back(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **SIZES)
    roll_back(tmp_path / "single", SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()))


def roll_back_on_ranks(rank: int, folder: Path, name: str) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "precision": "bf16-true"}
    roll_back(folder / name, sharded(name), **options)


@pytest.mark.parametrize("name", ["zero-2", "zero-3", "fsdp"])
def test_reference_update_of_shards_is_undone_by_a_roll_back_on_ranks(tmp_path: Path, name: str) -> None:
    save_tiny_policy(tmp_path / "policy", **SIZES)
    run_ranks(roll_back_on_ranks, tmp_path, name)


def test_blend_weights_adds_up_small_moves_of_a_bfloat16_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {name: torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16) for name in ("policy", "reference")}
    torch.nn.init.constant_(models["policy"].weight, 2.0)
    torch.nn.init.constant_(models["reference"].weight, 1.0)
    strategy = SingleDeviceRolloutStrategy()
    monkeypatch.setattr(strategy, "model_engine", models.get)
    averages: Weights = {}
    for _ in range(100):
        strategy.blended.blend("policy", "reference", 0.999, averages)
    torch.testing.assert_close(models["reference"].weight, torch.full((2, 2), 2 - 0.999**100, dtype=torch.bfloat16))


def average_on_ranks(rank: int, folder: Path) -> None:
    seen: list[Weights] = []
    for own, resume in (folder / "run", None), (folder / "resumed", RunFolder(folder / "run").checkpoint(2)):
        stage = build_stage(3, policy=str(folder / "policy"), algorithm=Algorithm(kl=KLConfig(0.1)))
        update = ReferenceUpdate(keep=0.999)
        callbacks: list[Any] = [update, PolicyCheckpoint(own, every=1, keep_last=9)]
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "precision": "bf16-true"}
        trainer, _ = train(stage, callbacks, strategy=sharded("fsdp"), resume=resume, **options)
        seen.append(update.rank_state())
    assert seen[0] and all(torch.equal(seen[1][name], average) for name, average in seen[0].items())
    said = "the average of the reference starts again (other shards)"
    assert update.load_rank_state(trainer, {"other": torch.zeros(1)}) == said
    assert update.load_rank_state(trainer, seen[0]) == "average of the reference" and update.rank_state()
    # As at a roll-back to a checkpoint of another number of workers.
    assert load_rank_states(trainer, folder) == [] and not update.rank_state()


def test_average_of_a_bfloat16_reference_survives_a_resume(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **SIZES)
    run_ranks(average_on_ranks, tmp_path)
    assert "average of the reference" in RunFolder(tmp_path / "resumed").resumes.read_text()
