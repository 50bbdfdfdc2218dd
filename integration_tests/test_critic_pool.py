"""A critic on a pool learns the same as a critic in the training workers, and a lost critic is always reported."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from lightning.pytorch import Callback
from torch import Tensor

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.config.models import CriticConfig, OptimizerConfig
from rl_plugins.errors import CheckpointError, DeadlineExceeded
from rl_plugins.models.pool_actor import PoolConfig
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.critic_pool import CriticLost, CriticPool
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.tests.stages import canned

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("running_ray")]

STEPS, SAVED = 3, 2


class Steps(Callback):
    """The metrics of every step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def pool(actors: int) -> CriticPool:
    config = PoolConfig("critic", "", "scalar", actors=actors)
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
    trainer.fit(stage, loader, ckpt_path=None if resume is None else resume / "state", weights_only=True)
    return seen.metrics, {name: weight.detach().clone() for name, weight in stage.policy.named_parameters()}


def assert_alike(metrics: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for row, other in zip(metrics, expected, strict=True):
        learnt = {name for name in other if name.startswith("train/")}
        assert {"train/critic/loss", "train/critic/lr", "train/critic/gradient_norm"} < learnt
        # Norms are in float32, and the division of rows decides which samples share a prompt's pass.
        assert {name: row[name] for name in learnt} == pytest.approx({name: other[name] for name in learnt}, rel=1e-5)
        assert row["time/update_critic"] > 0


def assert_same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        # A step is as large as the rate, 0.01. Adam amplifies the rounding of gradients near 0.
        torch.testing.assert_close(weight, others[name], rtol=0, atol=1e-4)


@dataclass(frozen=True)
class Trained:
    """Result of a run: its folder, the metrics of each step, and the weights of the policy."""

    run: Path
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def trained_in_the_workers(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run = tmp_path_factory.mktemp("workers")
    return Trained(run, *train(run, None))


@pytest.fixture(scope="module")
def one_process() -> CriticPool:
    """Pool for the critics of the tests."""
    return pool(1)


def test_policy_learns_the_same_from_a_critic_pool_and_resumes_with_fewer_processes(
    tmp_path: Path, trained_in_the_workers: Trained, one_process: CriticPool
) -> None:
    expected = trained_in_the_workers
    metrics, weights = train(tmp_path, pool(2))
    assert_alike(metrics, expected.metrics)
    assert_same(weights, expected.weights)
    checkpoint = RunFolder(tmp_path).checkpoint(SAVED)
    resumed = tmp_path / "resumed"
    metrics, weights = train(resumed, one_process, checkpoint)
    assert_alike(metrics, expected.metrics[SAVED:])
    assert_same(weights, expected.weights)
    assert "critic (weights, optimizer, schedule)" in RunFolder(resumed).resumes.read_text()


def test_critic_pool_refuses_a_checkpoint_of_a_critic_in_the_workers(
    tmp_path: Path, trained_in_the_workers: Trained, one_process: CriticPool
) -> None:
    with pytest.raises(CheckpointError, match=r"holds no critic that was trained on a pool of its own"):
        train(tmp_path, one_process, RunFolder(trained_in_the_workers.run).checkpoint(SAVED))


def test_critic_process_that_hangs_or_dies_ends_the_run(tmp_path: Path) -> None:
    critic = pool(2)
    train(tmp_path / "whole", critic, steps=1)
    asked: Any = ray.get_actor(critic.config.label(1)).ready.remote()
    process = psutil.Process(int(ray.get(asked, timeout=patient(60)).split("@")[0]))
    generous = critic.config
    critic.config = replace(generous, call_timeout_s=1.0)
    process.suspend()
    late = re.escape(repr(critic.config.label(1)))
    with pytest.raises(DeadlineExceeded, match=rf"rank 0 waited 1 s for .*{late} of the pool critic to"):
        train(tmp_path / "late", critic)
    critic.config = generous
    process.kill()
    with pytest.raises(CriticLost, match=r"rank 0: the pool critic failed to .*\. The updates .* are lost"):
        train(tmp_path / "killed", critic)
    # No process of the pool outlives its rank.
    name = critic.config.label(0)
    del critic
    gc.collect()
    wait_until(lambda: not alive(name), "the end of the other process")


def alive(actor: str) -> bool:
    try:
        ray.get_actor(actor)
    except ValueError:
        return False
    return True
