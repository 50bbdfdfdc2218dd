"""ZeRO in one process over gloo: named engines, weights, and checkpoints with bitwise restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from rl_plugins.errors import ConfigError
from rl_plugins.models.muon import MuonAndAdamW
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import zero_worker


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_strategy_engines_weight_sources_and_checkpoints(tmp_path: Path, stage: int) -> None:
    run_ranks(zero_worker.train, stage, tmp_path, world_size=1)


def test_weights_and_shards_are_read_while_deepspeed_gathers_parameters_ahead(tmp_path: Path) -> None:
    """With a large model, DeepSpeed has parameters in flight after passes without gradient."""
    run_ranks(zero_worker.read_after_passes, tmp_path, world_size=1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_validation_and_resume_of_a_checkpoint_load_trained_and_frozen_weights(tmp_path: Path, stage: int) -> None:
    for seed in (1, 2):
        save_tiny_policy(tmp_path / f"critic-{seed}", seed=seed)
    run_ranks(zero_worker.run_with_frozen_weights, "train", stage, tmp_path, 1, world_size=2)
    # The weights of seed 2 are other weights than in the checkpoint.
    run_ranks(zero_worker.run_with_frozen_weights, "validate", stage % 3 + 1, tmp_path, 2, world_size=1)
    run_ranks(zero_worker.run_with_frozen_weights, "resume", stage % 3 + 1, tmp_path, 2, world_size=1)


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_of_a_training_is_free_without_stage_and_trainer(tmp_path: Path, stage: int) -> None:
    run_ranks(zero_worker.train_and_forget, stage, tmp_path, world_size=1)


def test_teardown_leaves_module_and_optimizer_states_on_their_device() -> None:
    """A later export must not add tensors of two devices. Tensors on `meta` cannot be copied to the host."""
    module = LightningModule()
    module.policy = nn.Linear(2, 2, device="meta")
    parameters = list(module.policy.parameters())
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        optimizer.state[parameter] = {"exp_avg": torch.empty_like(parameter)}
    strategy = ZeroStrategy(accelerator=CPUAccelerator(), cluster_environment=LightningEnvironment())
    strategy._lightning_module, strategy.optimizers = module, [optimizer]
    strategy.teardown()
    states: list[Tensor] = [state["exp_avg"] for state in optimizer.state.values()]
    assert {tensor.device.type for tensor in [*module.parameters(), *states]} == {"meta"}


@pytest.mark.parametrize("is_writer", [True, False])
def test_one_rank_keeps_the_whole_model_that_follows_the_policy(tmp_path: Path, is_writer: bool) -> None:
    copied: list[Any] = []

    class Gathered(Tensor):
        def to(self, *arguments: Any, **options: Any) -> Tensor:
            copied.append(self)
            return self.as_subclass(Tensor).to(*arguments, **options)

    model = nn.Linear(2, 2)
    weights = [(name, parameter.detach().as_subclass(Gathered)) for name, parameter in model.named_parameters()]
    strategy = ZeroStrategy()
    strategy._model_engines["reference"] = model
    strategy.blended.names.add("reference")
    with (
        mock.patch.object(strategy, "weight_source", return_value=iter(weights)) as source,
        mock.patch.object(strategy, "broadcast", side_effect=str),
        mock.patch.object(ZeroStrategy, "is_global_zero", is_writer),
    ):
        strategy.save_checkpoint({}, tmp_path)
    assert len(copied) == (2 if is_writer else 0)
    # All ranks gather all weights.
    assert not list(source.return_value)


def test_zero_strategy_refuses_muon() -> None:
    layer = nn.Linear(2, 2)
    for optimizer in (MuonAndAdamW(layer), torch.optim.Muon([layer.weight])):
        with pytest.raises(ConfigError, match="Muon needs whole matrices, which ZeRO cuts into flat pieces"):
            ZeroStrategy()._train_engine("policy", layer, optimizer, 1.0)


def test_optimizer_steps_of_stage_3_are_in_groups_of_a_billion_parameters() -> None:
    """One group of the whole shard would need the float32 gradients of the shard at once."""
    for strategy, expected in ((ZeroStrategy(), 10**9), (ZeroStrategy(sub_group_size=5), 5)):
        assert isinstance(strategy.config, dict)
        assert strategy.config["zero_optimization"]["sub_group_size"] == expected
