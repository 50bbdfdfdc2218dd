"""Stages with kernels of Liger train to the same weights, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from rl_plugins.callbacks.liger_kernels import LigerKernels
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.models.tiny import build_model
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.callbacks.test_compiled_blocks import Kept
from rl_plugins.tests.models.plain_liger import plain_liger
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

STRATEGIES: dict[str, Any] = {
    "single": SingleDeviceRolloutStrategy,
    "zero": lambda: ZeroStrategy(stage=3, timeout_s=60),
    "fsdp": lambda: FSDPStrategy(timeout_s=60),
}


def trained(name: str, *callbacks: Callback, world_size: int, rank: int) -> dict[str, Tensor]:
    """Return the weights after two steps of fine-tuning."""
    stage = SFT(
        build_model(hidden_size=32, intermediate_size=48, num_layers=2, initializer_range=0.2),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        eval_sampling=SamplingConfig(max_tokens=4),
        optimizer=OptimizerConfig(lr=1e-3),
        tokens_per_micro_batch=40,
    )
    kept = Kept()
    trainer = canned.quiet_trainer(
        STRATEGIES[name](),
        accelerator="cpu",
        devices=1,
        num_nodes=world_size,
        precision="32-true",
        callbacks=[*callbacks, kept],
    )
    prompts = canned.PROMPTS[rank::world_size]
    batch = {
        "prompt_ids": [canned.tokenizer.encode(prompt) for prompt in prompts],
        "response_ids": [canned.tokenizer.encode(canned.RESPONSES[prompt][0]) for prompt in prompts],
    }
    trainer.fit(stage, canned.loader([batch] * 2))
    return kept.weights


def compare(rank: int, name: str, world_size: int) -> None:
    expected = trained(name, world_size=world_size, rank=rank)
    with plain_liger() as liger:
        found = trained(name, LigerKernels(), world_size=world_size, rank=rank)
    assert len(liger.options) == 1 and len(liger.heads) >= 2
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "world_size"), [("single", 1), ("zero", 2), ("fsdp", 2)])
def test_liger_kernels_train_to_the_same_weights(name: str, world_size: int) -> None:
    run_ranks(compare, name, world_size, world_size=world_size)
