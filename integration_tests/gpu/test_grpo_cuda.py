"""The GRPO recipe on one GPU that the trainer and the engine share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from integration_tests.conftest import Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is visible"),
]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_colocated_engine_samples_what_the_trainer_trains(start_recipe: Callable[..., Recipe], precision: str) -> None:
    recipe = start_recipe(
        "grpo",
        f"cuda-{precision}",
        "placement.device=cuda",
        "placement.num_workers=1",
        f"model.precision={precision}",
        "run.steps=4",
        "run.eval_every=0",
        "optimizer.lr=1e-3",
        "reward.functions.default={_target_: integration_tests.rewards.shortness}",
    )
    assert recipe.wait() == 0, recipe.tail()
    steps = [row for row in recipe.metrics() if "train/loss" in row]
    assert len(steps) == 4
    tolerance = 1e-3 if precision == "32-true" else 0.3
    assert all(row["train/rollout_gap_max"] < tolerance for row in steps), [
        row["train/rollout_gap_max"] for row in steps
    ]
    # Offload gives the trainer's memory up while the engine samples.
    assert all(row["memory/rollout"] < row["memory/update_policy"] for row in steps)
