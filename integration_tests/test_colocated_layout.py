"""Four workers with two rollout engines of two processes learn the same as one worker with one engine.

This is the layout of a machine with four GPUs: every engine is on the devices of two neighbouring workers. One of the
four processes of the engines is killed in the middle of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.campaign import KINDS
from integration_tests.conftest import Recipe
from integration_tests.pace import Pace
from integration_tests.test_gradient_invariance import vector
from rl_plugins.run_folder import read_metrics

pytestmark = pytest.mark.extended

STEPS, HELD = 10, 4
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
)
ALONE = (
    "placement.num_workers=1", "placement.cpus_per_worker=2",
    "reward.functions.default={_target_: integration_tests.rewards.shortness}",
)  # fmt: skip
TOGETHER = ("placement.num_workers=4", "placement.cpus_per_worker=0.5", "rollout.tensor_parallel_size=2")


def test_engines_on_the_devices_of_all_workers_train_the_same_policy_also_after_a_kill(
    start_recipe: Callable[..., Recipe], workplace: Path, tmp_path: Path
) -> None:
    alone = start_recipe("grpo", "alone", *COMMON, *ALONE)
    assert alone.wait() == 0, alone.tail()
    # Each of four workers has a process for its share of the rewards.
    pace = Pace(tmp_path / "pace", samples=8)
    pace.allow(HELD - 1)
    together = start_recipe("grpo", "together", *COMMON, *TOGETHER, *pace.overrides)
    pace.wait(together)
    KINDS["process of an engine"].find(together)[0].kill()
    pace.allow_all()
    assert together.wait() == 0, together.tail()

    expected, found = (read_metrics(recipe.run / "metrics.jsonl") for recipe in (alone, together))
    assert len(expected["train/reward"]) == STEPS and set(expected["rollout/engines"].values()) == {1.0}
    assert {found["rollout/engines"][step] for step in range(1, HELD + 1)} == {2.0}
    assert sum(found["rollout/engines_lost"].values()) == 1
    for metric in ("train/reward", "train/response_length", "train/loss"):
        assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric
    # Adam's first steps are signs: where a gradient is next to nothing, rounding decides.
    before = vector(workplace / "tiny")
    update, other = (vector(recipe.run / "policy") - before for recipe in (alone, together))
    difference = (other - update).abs()
    assert difference.median() < 1e-7 and difference.quantile(0.999) < 1e-5
    assert difference.norm() < 1e-3 * update.norm()
