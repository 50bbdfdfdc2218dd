"""The GRPO recipe on GPUs: trainer and engine share one, share two, or have one each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from integration_tests.conftest import Recipe
from integration_tests.gpu import NEEDS_CUDA

pytestmark = NEEDS_CUDA
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

# Name to GPUs, and options.
COLOCATED = {
    "zero3-float32": ["model.precision=32-true"],
    "zero3": ["model.precision=bf16-mixed"],
    "zero2": ["model.precision=bf16-mixed", "strategy.zero_stage=2"],
    "zero1": ["model.precision=bf16-mixed", "strategy.zero_stage=1"],
    "fsdp": ["model.precision=bf16-mixed", "strategy.name=fsdp"],
    "lora": ["model.precision=bf16-mixed", "model.lora.rank=4"],
}
SEVERAL = {
    "two-colocated": ["placement.num_workers=2"],
    "tensor-parallel": ["placement.num_workers=2", "strategy.name=fsdp", "strategy.tensor_parallel=2"],
    "split": ["placement.num_workers=1", "placement.rollout=split"],
}


def train(start_recipe: Callable[..., Recipe], name: str, *options: str) -> list[dict[str, float]]:
    """Four steps, whose weight updates are checked and whose memory phases assert what they free."""
    recipe = start_recipe(
        "grpo",
        f"cuda-{name}",
        "placement.device=cuda",
        "rollout.check_updates=1",
        "run.steps=4",
        "run.eval_every=0",
        "optimizer.lr=1e-3",
        "reward.functions.default={_target_: integration_tests.rewards.shortness}",
        *options,
    )
    assert recipe.wait() == 0, recipe.tail()
    steps = [row for row in recipe.metrics() if "train/loss" in row]
    assert len(steps) == 4
    tolerance = 1e-3 if "model.precision=32-true" in options else 0.3
    gaps = [row["train/rollout_gap_max"] for row in steps]
    assert max(gaps) < tolerance, gaps
    return steps


@pytest.mark.parametrize("name", COLOCATED)
def test_colocated_engine_samples_from_the_trained_weights(start_recipe: Callable[..., Recipe], name: str) -> None:
    steps = train(start_recipe, name, "placement.num_workers=1", *COLOCATED[name])
    # The trainer has given its memory up while the engine samples, and the engine while it trains.
    assert all(row["memory/rollout"] < row["memory/update_policy"] for row in steps)
    assert all(row["memory/engine_asleep"] < row["memory/engine_awake"] for row in steps)


@two_gpus
@pytest.mark.parametrize("name", SEVERAL)
def test_several_gpus(start_recipe: Callable[..., Recipe], name: str) -> None:
    train(start_recipe, name, "model.precision=bf16-mixed", *SEVERAL[name])
