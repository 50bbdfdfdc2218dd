"""A run that loses a process of the critic's pool goes on from the last checkpoint, without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration_tests.conftest import Recipe, recipes_in
from integration_tests.pace import Pace
from rl_plugins.run_folder import RunFolder, read_metrics

pytestmark = pytest.mark.extended

COMMON = (
    "run.steps=5", "run.checkpoint_every=2", "run.eval_every=0", "run.deterministic=true", "tracking.enabled=false",
    "batch.prompts_per_step=8", "batch.samples_per_prompt=4", "batch.updates_per_step=2", "optimizer.lr=1e-3",
    "critic.optimizer.lr=1e-3", "critic.optimizer.warmup_steps=4", "placement.device=cpu",
    "rollout.engine=transformers", "placement.cpus_per_worker=0.5",
    "reward.functions.default={_target_: integration_tests.rewards.shortness}",
)  # fmt: skip
POOL = ("placement.critic.actors=2", "placement.critic.cpus=0.5")
SAME = ("train/reward", "train/loss", "train/critic/loss", "train/critic/gradient_norm", "train/critic/lr")


@pytest.fixture(scope="module")
def start(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Recipe]]:
    with recipes_in(tmp_path_factory.mktemp("critic"), workplace) as start:
        yield start


@pytest.fixture(scope="module")
def whole(start: Callable[..., Recipe]) -> Recipe:
    """Run with a critic's pool of two processes, after the last step."""
    run = start("ppo", "whole", *COMMON, *POOL)
    assert run.wait() == 0, run.tail()
    assert "whole: critic               2   0.5     0  PACK" in run.tail(1_000_000)
    return run


def test_critic_pool_learns_the_same_as_a_critic_beside_the_policy(start: Callable[..., Recipe], whole: Recipe) -> None:
    alone = start("ppo", "alone", *COMMON, "run.steps=2", "run.export=false", "launcher=local")
    assert alone.wait() == 0, alone.tail()
    expected, found = (read_metrics(recipe.run / "metrics.jsonl") for recipe in (whole, alone))
    for name in SAME:
        assert found[name] == pytest.approx({step: expected[name][step] for step in (1, 2)}, rel=1e-3), name


def test_run_that_loses_a_critic_process_goes_on_from_the_last_checkpoint(
    start: Callable[..., Recipe], whole: Recipe, tmp_path: Path
) -> None:
    # Each of two ranks has a process, which scores the rank's half of the samples.
    pace = Pace(tmp_path / "pace", samples=16)
    pace.allow(3)
    broken = start("ppo", "broken", *COMMON, *POOL, "placement.max_restarts=1", *pace.overrides)
    pace.wait(broken)
    broken.kill_one("CriticActor")
    pace.allow_all()
    assert broken.wait() == 0, broken.tail()
    resumed = RunFolder(broken.run).resumes.read_text().splitlines()
    assert len(resumed) == 1 and "critic (weights, optimizer, schedule)" in resumed[0], resumed
    assert "checkpoint_00000002" in resumed[0], resumed
    expected, found = (read_metrics(recipe.run / "metrics.jsonl") for recipe in (whole, broken))
    for name in SAME:
        assert list(expected[name]) == list(range(1, 6)) and found[name] == expected[name], name
    policies = [(recipe.run / "policy" / "model.safetensors").read_bytes() for recipe in (whole, broken)]
    assert policies[0] == policies[1]
