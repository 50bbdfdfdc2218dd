"""A critic on a pool of its own learns what one in the training workers learns, and is never lost without a word."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from lightning.pytorch import Callback
from torch import Tensor

from integration_tests.conftest import Recipe
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.models.pool_actor import PoolConfig
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.stages.critic import CriticConfig
from rl_plugins.stages.critic_pool import CriticLost, CriticPool
from rl_plugins.stages.optimizer import OptimizerConfig
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.stages import canned

STEPS, SAVED = 3, 2


class Steps(Callback):
    """The metrics of every step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def pool(actors: int, deadline_s: float = 60.0) -> CriticPool:
    config = PoolConfig("critic", "", "scalar", actors=actors, call_timeout_s=deadline_s)
    return CriticPool(config, [{"num_cpus": 0}] * actors)


def train(
    run: Path, critic: CriticPool | None, resume: Path | None = None, steps: int = STEPS
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Steps of PPO in this process; the metrics of each, and the policy."""
    settings = CriticConfig(canned.other_model(), OptimizerConfig(lr=0.02, warmup_steps=1, gradient_clip=0.1), 1)
    stage = canned.ppo(PolicyOptimization, critic=settings, max_steps=steps)
    if critic is not None:
        stage.critic = critic
    seen = Steps()
    checkpoints = PolicyCheckpoint(run, every=SAVED, keep_last=9)
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, precision="64-true", callbacks=[seen, checkpoints])
    loader = canned.loader([canned.prompt_batch(canned.PROMPTS)] * STEPS)
    trainer.fit(stage, loader, ckpt_path=None if resume is None else resume / "state", weights_only=False)
    return seen.metrics, {name: weight.detach().clone() for name, weight in stage.policy.named_parameters()}


def assert_alike(metrics: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for row, other in zip(metrics, expected, strict=True):
        learnt = {name for name in other if name.startswith("train/")}
        assert {"train/critic/loss", "train/critic/lr", "train/critic/gradient_norm"} < learnt
        # Norms are in float32, and which samples share a prompt's pass depends on how rows are cut.
        assert {name: row[name] for name in learnt} == pytest.approx({name: other[name] for name in learnt}, rel=1e-5)
        assert row["time/update_critic"] > 0


def assert_same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        # A step is as large as the rate, 0.01; Adam makes much of how gradients that are almost 0 are rounded.
        torch.testing.assert_close(weight, others[name], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def in_the_workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return train(tmp_path_factory.mktemp("workers"), None)


@pytest.mark.usefixtures("running_ray")
def test_the_policy_learns_the_same_from_it_and_goes_on_with_fewer_processes(
    tmp_path: Path, in_the_workers: tuple[list[dict[str, float]], dict[str, Tensor]]
) -> None:
    expected, policy = in_the_workers
    metrics, weights = train(tmp_path, pool(2))
    assert_alike(metrics, expected)
    assert_same(weights, policy)
    checkpoint = RunFolder(tmp_path).checkpoint(SAVED)
    metrics, weights = train(tmp_path, pool(1), checkpoint)
    assert_alike(metrics, expected[SAVED:])
    assert_same(weights, policy)
    assert "critic (weights, optimizer, schedule)" in RunFolder(tmp_path).resumes.read_text()


@pytest.mark.usefixtures("running_ray")
def test_what_cannot_go_on_says_so(tmp_path: Path) -> None:
    train(tmp_path, None, steps=SAVED)
    with pytest.raises(ConfigError, match=r"holds no critic that was trained on a pool of its own"):
        train(tmp_path, pool(1), RunFolder(tmp_path).checkpoint(SAVED))


@pytest.mark.usefixtures("running_ray")
def test_a_process_that_dies_or_hangs_ends_the_run(tmp_path: Path) -> None:
    for signal_sent, error, words in (
        (signal.SIGSTOP, DeadlineExceeded, r"rank 0 waited 5 s for '\S+-critic-1' of the pool critic to"),
        (signal.SIGKILL, CriticLost, r"rank 0 asked the pool critic to .*: what the critic has learnt .* is lost"),
    ):
        critic = pool(2, deadline_s=5.0)
        train(tmp_path / error.__name__, critic, steps=1)
        process: Any = ray.get(ray.get_actor(critic.config.label(1)).ready.remote())
        os.kill(int(process.split("@")[0]), signal_sent)
        with pytest.raises(error, match=words):
            train(tmp_path / error.__name__, critic)
        # Nothing of it outlives the rank that has it.
        name = critic.config.label(0)
        del critic
        gc.collect()
        wait_until(lambda name=name: not alive(name))


def alive(actor: str) -> bool:
    try:
        ray.get_actor(actor)
    except ValueError:
        return False
    return True


def wait_until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
def test_a_run_that_loses_it_goes_on_from_the_last_checkpoint(start_recipe: Callable[..., Recipe]) -> None:
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
