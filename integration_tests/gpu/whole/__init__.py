"""Tests of the whole stack on GPUs: recipes in processes of their own. They need the extra `gpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from integration_tests.conftest import Recipe

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is visible"),
]
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

COMMON = (
    "placement.device=cuda",
    "rollout.check_updates=1",
    "run.eval_every=0",
    "optimizer.lr=1e-3",
    "tracking.enabled=false",
    "reward.functions.default={_target_: integration_tests.rewards.shortness}",
)
STEPS = 4
# The products of the trainer are TF32 with 32-true.
_LARGEST_GAP = {"32-true": 0.03, "bf16-mixed": 0.3}


def start(start_recipe: Callable[..., Recipe], name: str, *options: str) -> Recipe:
    """Start GRPO in a new interpreter, because a forked process cannot use CUDA if its parent has used CUDA."""
    return start_recipe("grpo", name, *COMMON, *options, new_interpreter=True)


def train(
    start_recipe: Callable[..., Recipe], name: str, *options: str, precision: str = "bf16-mixed"
) -> tuple[Recipe, list[dict[str, float]]]:
    """Take four steps of GRPO. The run checks each weight update, and the memory that each phase frees.

    Returns:
        The ended run, and the metrics of its steps.
    """
    recipe = start(start_recipe, name, f"run.steps={STEPS}", f"model.precision={precision}", *options)
    assert recipe.wait() == 0, recipe.tail()
    steps = recipe.trained()
    assert len(steps) == STEPS
    # Rows that an older policy has sampled differ by the update, too.
    gaps = [row["train/rollout_gap_max"] for row in steps if not row.get("rollout/staleness")]
    assert max(gaps) < _LARGEST_GAP[precision], gaps
    return recipe, steps
