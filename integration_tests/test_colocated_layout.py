"""Four workers with two rollout engines of two processes learn the same as one worker with one engine.

This is the layout of a machine with four GPUs: every engine is on the devices of two neighbouring workers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.conftest import Recipe
from integration_tests.test_gradient_invariance import vector
from rl_plugins.run_folder import read_metrics

pytestmark = pytest.mark.extended

STEPS = 10
COMMON = (
    f"run.steps={STEPS}",
    "run.eval_every=0",
    "run.eval_before=false",
    "batch.prompts_per_step=8",
    "batch.samples_per_prompt=4",
    "batch.updates_per_step=1",
    "optimizer.lr=1e-4",
    "rollout.engines=per_worker",
    "tracking.enabled=false",
    "placement.device=cpu",
    "reward.functions.default={_target_: integration_tests.rewards.shortness}",
)
ALONE = ("placement.num_workers=1", "placement.cpus_per_worker=2")
TOGETHER = ("placement.num_workers=4", "placement.cpus_per_worker=0.5", "rollout.tensor_parallel_size=2")


def test_engines_on_the_devices_of_all_workers_train_the_same_policy(
    start_recipe: Callable[..., Recipe], workplace: Path
) -> None:
    series, updates, before = [], [], vector(workplace / "tiny")
    for name, options in (("alone", ALONE), ("together", TOGETHER)):
        recipe = start_recipe("grpo", name, *COMMON, *options)
        assert recipe.wait() == 0, recipe.tail()
        series.append(read_metrics(recipe.run / "metrics.jsonl"))
        updates.append(vector(recipe.run / "policy") - before)
    alone, together = series
    assert len(alone["train/reward"]) == STEPS
    assert set(together["rollout/engines"].values()) == {2.0} and set(alone["rollout/engines"].values()) == {1.0}
    for metric in ("train/reward", "train/response_length", "train/loss"):
        assert together[metric] == pytest.approx(alone[metric], rel=1e-4, abs=1e-6), metric
    # Adam's first steps are signs: where a gradient is next to nothing, rounding decides.
    difference = (updates[1] - updates[0]).abs()
    assert difference.median() < 1e-7 and difference.quantile(0.999) < 1e-5
    assert difference.norm() < 1e-3 * updates[0].norm()
