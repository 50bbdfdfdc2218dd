"""Stages on two ranks with a fake GPU each: collectives have only tensors that NCCL takes."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import CriticConfig, LoraConfig
from rl_plugins.data.experience import Experience
from rl_plugins.ranks import Ranks
from rl_plugins.stages.critic_training import CriticLearner
from rl_plugins.tests.fake_cuda import CPU, CUDA
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned, canned_labels, canned_preferences
from rl_plugins.tests.stages.fake_gpu import training_on_fake_gpu
from rl_plugins.tests.stages.test_critic_training import learn, trained_in_workers, training


def optimize_policy(rank: int, algorithm: Algorithm, updates: int) -> Counter[str]:
    with training_on_fake_gpu() as observed:
        canned.rank_gradients(rank, algorithm, updates)
        return Counter(observed.collectives)


@pytest.mark.parametrize("recipe", ["ppo", "prime", "pf_ppo"])
def test_policy_optimization_communicates_tensors_that_nccl_takes(recipe: str) -> None:
    for found, _ in run_ranks(optimize_policy, *canned.algorithm_of(recipe)):
        assert found["allreduce_"] > 20


def optimize_preferences(rank: int) -> Counter[str]:
    with training_on_fake_gpu() as observed:
        canned_preferences.gradients("dpo", tokens_per_micro_batch=45, rank=rank, world_size=2)
        prompts, options = canned_preferences.ONLINE["all"]
        canned_preferences.online_gradients(prompts, rank=rank, world_size=2, **options)
        return Counter(observed.collectives)


def test_preference_optimization_communicates_tensors_that_nccl_takes() -> None:
    for found, _ in run_ranks(optimize_preferences):
        assert found["allreduce_"] > 20


def model_rewards(rank: int) -> Counter[str]:
    with training_on_fake_gpu() as observed:
        case = next(iter(canned_labels.CASES))
        canned_labels.gradients(case, tokens_per_micro_batch=60, rank=rank, world_size=2)
        canned_labels.validation(case, canned_labels.UNEVEN, rank)
        return Counter(observed.collectives)


def test_reward_modeling_communicates_tensors_that_nccl_takes() -> None:
    for found, _ in run_ranks(model_rewards):
        assert found["allreduce_"] > 20


def train_critic(rank: int, path: str, steps: list[Experience]) -> Counter[str]:
    adapter = CriticConfig(lora=LoraConfig(rank=2))
    with training_on_fake_gpu() as observed:
        for options in ({}, {"computes_in": torch.bfloat16, "config": adapter}):
            learner = CriticLearner(training(path=path, **options), device=str(CUDA))
            learn(learner, steps, rank, 2)
        return Counter(observed.collectives)


def test_critic_learner_communicates_tensors_that_nccl_takes() -> None:
    steps = trained_in_workers().trained_on[:1]
    for found, _ in run_ranks(train_critic, canned.other_model(), steps):
        assert found["allreduce_"] == 4 and found["broadcast_"] > 20


def sum_on_the_host(rank: int) -> str:
    """Return the error of a stage with sums over the ranks in host memory, which gloo takes."""
    with (
        training_on_fake_gpu(),
        patch.object(canned, "Ranks", lambda rank, size, device: Ranks(rank, size, CPU)),
        pytest.raises(AssertionError) as raised,
    ):
        canned.rank_gradients(rank, *canned.algorithm_of("ppo"))
    return str(raised.value)


def test_training_on_fake_gpu_refuses_a_stage_with_collectives_on_the_host() -> None:
    for found, _ in run_ranks(sum_on_the_host):
        assert found == "allreduce_: NCCL takes tensors on cuda:0, not on cpu"
