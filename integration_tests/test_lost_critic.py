"""A run that loses a process of its critic's pool goes on from the last checkpoint, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from integration_tests.conftest import Recipe
from rl_plugins.run_folder import RunFolder, read_metrics

COMMON = (
    "run.steps=8", "run.checkpoint_every=2", "run.eval_every=0", "run.deterministic=true", "tracking.enabled=false",
    "batch.prompts_per_step=8", "batch.samples_per_prompt=4", "batch.updates_per_step=2", "optimizer.lr=1e-3",
    "critic.optimizer.lr=1e-3", "critic.optimizer.warmup_steps=4", "placement.device=cpu",
    "rollout.engine=transformers", "placement.cpus_per_worker=0.5",
    "reward.functions.default={_target_: integration_tests.rewards.shortness}",
)  # fmt: skip
POOL = ("placement.critic.actors=2", "placement.critic.cpus=0.5")
SAME = ("train/reward", "train/loss", "train/critic/loss", "train/critic/gradient_norm", "train/critic/lr")


@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_run_that_loses_a_critic_process_goes_on_from_the_last_checkpoint(start_recipe: Callable[..., Recipe]) -> None:
    whole = start_recipe("ppo", "whole", *COMMON, *POOL)
    assert whole.wait() == 0, whole.tail()
    assert "whole: critic               2   0.5     0  PACK" in whole.tail(1_000_000)

    broken = start_recipe("ppo", "broken", *COMMON, *POOL, "placement.max_restarts=1")
    broken.wait_for_step(3)
    broken.kill_one("CriticActor")
    assert broken.wait() == 0, broken.tail()
    resumed = RunFolder(broken.run).resumes.read_text().splitlines()
    assert len(resumed) == 1 and "critic (weights, optimizer, schedule)" in resumed[0], resumed
    expected, found = (read_metrics(recipe.run / "metrics.jsonl") for recipe in (whole, broken))
    for name in SAME:
        assert list(expected[name]) == list(range(1, 9)) and found[name] == expected[name], name
    policies = [(recipe.run / "policy" / "model.safetensors").read_bytes() for recipe in (whole, broken)]
    assert policies[0] == policies[1]

    # Two ranks and two processes learn what two ranks learn by themselves.
    alone = start_recipe("ppo", "alone", *COMMON, "run.steps=2", "run.export=false")
    assert alone.wait() == 0, alone.tail()
    by_themselves = read_metrics(alone.run / "metrics.jsonl")
    for name in SAME:
        assert by_themselves[name] == pytest.approx({step: expected[name][step] for step in (1, 2)}, rel=1e-3), name
