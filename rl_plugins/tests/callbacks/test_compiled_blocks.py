"""Compiled blocks compute the same as plain blocks, with one compilation for all blocks and rows."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.callbacks.compiled_blocks import CompiledBlocks
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned
from rl_plugins.tests.tiers import tiered

STRATEGIES: dict[str, Any] = {"single": SingleDeviceRolloutStrategy, "zero": ZeroStrategy, "fsdp": FSDPStrategy}
OPTIONS: dict[str, dict[str, Any]] = {"single": {}, "zero": {"stage": 2, "timeout_s": 60}, "fsdp": {"timeout_s": 60}}


class Kept(Callback):
    """Keeps the trained weights of the policy before the end of the strategy."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = {name: weight.float().clone() for name, weight in trainer.strategy.weight_source("policy")}


def trained(name: str, *callbacks: Callback, blocks: int, world_size: int = 1, rank: int = 0) -> dict[str, Tensor]:
    """Return the weights after two steps of rows of different lengths."""
    stage = PolicyOptimization(
        build_model(hidden_size=32, intermediate_size=48, num_layers=blocks, initializer_range=0.2),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        algorithm=Algorithm(),
        optimizer=OptimizerConfig(lr=1e-3),
        tokens_per_micro_batch=40,
    )
    canned.metrics_of(stage)
    kept = Kept()
    trainer = canned.quiet_trainer(
        STRATEGIES[name](rollout=canned.CannedRollout(), **OPTIONS[name]),
        accelerator="cpu",
        devices=1,
        num_nodes=world_size,
        precision="32-true",
        callbacks=[*callbacks, kept],
    )
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS[rank::world_size])] * 2))
    return kept.weights


def compare(rank: int, name: str, world_size: int, blocks: int) -> None:
    counter, options = CompileCounter(), {"blocks": blocks, "world_size": world_size, "rank": rank}
    expected = trained(name, **options)
    # Other tests of ranks compile nothing.
    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"):
        found = trained(name, CompiledBlocks(backend=counter), **options)
    # Parts of a block before and after attention: without gradient, and with gradient in the first and other blocks.
    assert 0 < counter.frame_count <= 12
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "world_size", "blocks"),
    tiered([("single", 1, 3), ("zero", 1, 1), ("fsdp", 2, 1)], {("zero", 1, 1)}),
)
def test_compiled_blocks_train_to_the_same_weights(name: str, world_size: int, blocks: int) -> None:
    run_ranks(compare, name, world_size, blocks, world_size=world_size)


def test_compiled_blocks_refuses_a_model_without_named_blocks() -> None:
    class Own(nn.Module):
        pass

    class Stage:
        def named_models(self) -> dict[str, nn.Module]:
            return {"policy": Own()}

        def gradient_clip(self, name: str) -> float:
            return 0.0

    stage: Any = Stage()
    trainer: Any = None
    with pytest.raises(ConfigError, match=r"CompiledBlocks: the policy, a Own, does not name the classes"):
        CompiledBlocks().on_fit_start(trainer, stage)
