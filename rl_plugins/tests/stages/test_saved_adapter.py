"""Training from a saved adapter goes on with the function of the adapter, which is the reference, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import CriticConfig, LoraConfig, OptimizerConfig
from rl_plugins.models.export import save_adapter, save_policy
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.lora import MergedWeightSource, add_adapter
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.saved_adapter_worker import SETTINGS, Training, log_probs, stage_of, train
from rl_plugins.weights.source import ModuleWeightSource


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, an adapter of the policy, and the merged policy."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_policy(folder / "policy", hidden_size=32, intermediate_size=48, initializer_range=0.2)
    model = add_adapter(load_causal_lm(str(folder / "policy"), dtype=torch.float32), LoraConfig(**SETTINGS))
    source = MergedWeightSource(ModuleWeightSource(model), with_random_adapter(model))
    save_adapter(model, source.adapter(), build_tokenizer(), folder / "adapter", is_writer=True)
    save_policy(model, source, build_tokenizer(), folder / "merged", is_writer=True)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Training:
    return train(0, "single", str(folder / "policy"), str(folder / "adapter"))


def log_probs_of(path: Path) -> Tensor:
    return log_probs(load_causal_lm(str(path), dtype=torch.float32))


def test_policy_and_reference_start_as_the_merged_model(folder: Path, alone: Training) -> None:
    merged_BT = log_probs_of(folder / "merged")
    assert float((merged_BT - log_probs_of(folder / "policy")).abs().max()) > 0.1
    torch.testing.assert_close(alone.log_probs_BT, merged_BT, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone.ref_log_probs_BT, merged_BT, rtol=0, atol=1e-5)
    first, second = alone.kl
    assert abs(first) < 1e-6 < abs(second)


@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_two_ranks_train_from_a_saved_adapter_like_a_single_device(
    folder: Path, alone: Training, strategy: str
) -> None:
    for training, *_ in run_ranks(train, strategy, str(folder / "policy"), str(folder / "adapter")):
        for one, other in zip(training, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def fit(stage: Any, **options: Any) -> Any:
    """Return a stage after a step on a single device."""
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, precision="32-true")
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)]), **options)
    return stage


def test_named_reference_is_the_policy_without_the_saved_adapter(folder: Path) -> None:
    policy = str(folder / "policy")
    lora = LoraConfig(**SETTINGS, path=str(folder / "adapter"))
    stage = fit(stage_of(policy, lora, PolicyOptimization, reference=policy))
    assert set(stage.named_models()) == {"policy"}


def test_critic_starts_from_a_saved_adapter_of_the_policy(folder: Path) -> None:
    lora = LoraConfig(**SETTINGS, path=str(folder / "adapter"))
    critic = CriticConfig(optimizer=OptimizerConfig(lr=0.0), lora=lora)
    options = {"critic": critic, "algorithm": Algorithm(advantage="gae")}
    stage = fit(stage_of(str(folder / "policy"), LoraConfig(rank=0), PolicyOptimization, **options))
    saved = MergedWeightSource(ModuleWeightSource(stage.critic), stage.critic)
    merged = dict(load_causal_lm(str(folder / "merged"), dtype=torch.float32).named_parameters())
    for name, weight in saved:
        if name in merged:
            torch.testing.assert_close(weight, merged[name], rtol=0, atol=1e-6)


def test_checkpoint_replaces_the_saved_adapter_and_the_reference_stays(folder: Path, tmp_path: Path) -> None:
    policy, lora = str(folder / "policy"), LoraConfig(**SETTINGS, path=str(folder / "adapter"))
    first = fit(stage_of(policy, lora, PolicyOptimization))
    first.trainer.save_checkpoint(tmp_path / "state")
    # The epoch of the checkpoint is over, so the resumed stage takes no step.
    again = fit(stage_of(policy, lora), ckpt_path=str(tmp_path / "state"))
    expected = dict(first.policy.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in again.policy.named_parameters())
    start_BT = log_probs(again.reference)
    torch.testing.assert_close(start_BT, log_probs_of(folder / "merged"), rtol=0, atol=1e-5)
    assert float((log_probs(again.policy) - start_BT).abs().max()) > 1e-3
