"""Stages on a GPU: tensors are on the right device in losses, heads, metrics, packed rows and merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import CriticConfig, LoraConfig, OptimizerConfig
from rl_plugins.models.lora import plain_weights
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.fake_cuda import CUDA
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned, canned_answers, canned_labels, canned_preferences
from rl_plugins.tests.stages.fake_gpu import training_on_fake_gpu
from rl_plugins.tests.tiers import tiered
from rl_plugins.weights.source import ModuleWeightSource

CORE = {"grpo", "ppo", "safe_rlhf", "prime", "pf_ppo", "gspo", "on_policy_distillation", "optimal_token_baseline"}
"""Algorithms of `make test`: one with each model, and one of each way to make advantages."""


def devices_of(tensors: list[Tensor]) -> set[torch.device]:
    return {tensor.device for tensor in tensors}


@pytest.mark.parametrize("recipe", tiered(canned.RECIPES, CORE))
def test_policy_optimization_keeps_all_tensors_of_a_step_on_the_gpu(recipe: str) -> None:
    algorithm, updates = canned.algorithm_of(recipe)
    with training_on_fake_gpu():
        gradients, _ = canned.gradients(algorithm, tokens_per_micro_batch=45, updates_per_step=updates)
        assert devices_of([tensor for update in gradients for tensor in update]) == {CUDA}


@for_each("packing", [True, False])
def test_policy_optimization_on_a_gpu_gives_the_gradients_of_a_cpu(packing: bool) -> None:
    algorithm, updates = canned.algorithm_of("ppo")
    options: dict[str, Any] = {"tokens_per_micro_batch": 45, "updates_per_step": updates, "packing": packing}
    expected, metrics_of_cpu = canned.gradients(algorithm, **options)
    with training_on_fake_gpu():
        gradients, metrics = canned.gradients(algorithm, **options)
    for update, expected_update in zip(gradients, expected, strict=True):
        for one, other in zip(update, expected_update, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert metrics["train/loss"] == pytest.approx(metrics_of_cpu["train/loss"])


def test_preference_optimization_keeps_all_tensors_of_a_step_on_the_gpu() -> None:
    with training_on_fake_gpu():
        results = [canned_preferences.gradients(case, tokens_per_micro_batch=45) for case in canned_preferences.CASES]
        results.append(canned_preferences.online_gradients(canned.PROMPTS))
        for updates, _ in results:
            assert devices_of([tensor for update in updates for tensor in update]) == {CUDA}


@for_each("packing", [True, False])
def test_sft_on_a_gpu_gives_the_gradient_of_a_cpu(packing: bool) -> None:
    expected, metrics_of_cpu = canned_answers.gradients(tokens_per_micro_batch=45, packing=packing)
    with training_on_fake_gpu():
        gradient, metrics = canned_answers.gradients(tokens_per_micro_batch=45, packing=packing)
        assert devices_of(gradient) == {CUDA}
    for one, other in zip(gradient, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    assert metrics["train/loss"] == pytest.approx(metrics_of_cpu["train/loss"])


def test_reward_modeling_keeps_all_tensors_of_a_step_on_the_gpu() -> None:
    with training_on_fake_gpu():
        for case in canned_labels.CASES:
            gradient, _ = canned_labels.gradients(case, tokens_per_micro_batch=60)
            assert devices_of(gradient) == {CUDA}
            assert canned_labels.validation(case, [[0, 1, 2]])


def test_adapters_train_and_merge_on_the_gpu(tmp_path: Path) -> None:
    folder = save_tiny_policy(tmp_path, hidden_size=32, intermediate_size=48)
    adapter = LoraConfig(rank=2)
    with training_on_fake_gpu():
        stage = PolicyOptimization(
            str(folder),
            tokenizer=canned.tokenizer,
            scorer=canned.CannedScorer(),
            sampling=canned.SamplingConfig(max_tokens=20, num_samples=3),
            algorithm=Algorithm(advantage="gae"),
            optimizer=OptimizerConfig(lr=0.01),
            critic=CriticConfig(optimizer=OptimizerConfig(lr=0.01), lora=adapter),
            lora=adapter,
        )
        strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
        trainer = canned.quiet_trainer(strategy, precision="bf16-true")
        trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)] * 2))
        # Lightning moves the models to the host at the end.
        policy = stage.policy.to(CUDA)
        merged = dict(plain_weights(ModuleWeightSource(policy), policy))
        assert devices_of(list(merged.values())) == {CUDA}
