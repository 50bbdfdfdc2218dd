"""Stages with a trained adapter: the policy with the adapter off is the reference."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.callbacks.averages import ReferenceUpdate
from rl_plugins.config.models import CriticConfig, LoraConfig, OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.lora import has_adapter, plain_weights
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.preference_optimization import PreferenceOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned, canned_preferences, zero_lora_worker
from rl_plugins.weights.source import ModuleWeightSource

LORA = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("policy"), hidden_size=32, intermediate_size=48))


@pytest.fixture(scope="module")
def copy(policy: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(shutil.copytree(policy, tmp_path_factory.mktemp("copy") / "policy"))


def fit(stage: Any, batches: list[Any], *callbacks: Any) -> dict[str, float]:
    # The new adapter is random numbers.
    torch.manual_seed(3)
    metrics = canned.metrics_of(stage)
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, precision="32-true", callbacks=list(callbacks))
    trainer.fit(stage, canned.loader(batches))
    return metrics


def policy_optimization(policy: Any, **options: Any) -> PolicyOptimization:
    defaults = {"algorithm": Algorithm(kl=KLConfig(0.1)), "optimizer": OptimizerConfig(lr=0.01)}
    settings: dict[str, Any] = {**defaults, **options}
    return PolicyOptimization(
        policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE),
        **settings,
    )


def preference_optimization(policy: Any, **options: Any) -> PreferenceOptimization:
    return PreferenceOptimization(
        policy,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        eval_sampling=SamplingConfig(max_tokens=20),
        optimizer=OptimizerConfig(lr=0.01),
        **options,
    )


PROMPTS = [canned.prompt_batch(canned.PROMPTS)] * 2
PAIRS = [canned_preferences.batch_of(True, [0, 1, 2])] * 2


def weights(stage: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in stage.policy.named_parameters()}


@pytest.mark.parametrize(
    ("make", "batches"),
    [(policy_optimization, PROMPTS), (preference_optimization, PAIRS)],
    ids=["policy optimization", "preference optimization"],
)
def test_policy_with_the_adapter_off_equals_a_separate_reference(
    policy: str, copy: str, make: Any, batches: Any
) -> None:
    alone, beside = make(policy, lora=LORA), make(policy, lora=LORA, reference=copy)
    metrics = [fit(stage, batches) for stage in (alone, beside)]
    assert set(alone.named_models()) == {"policy"} and set(beside.named_models()) == {"policy", "reference"}
    for name, value in metrics[1].items():
        assert metrics[0][name] == value or name.startswith(("time/", "memory/", "idle/")) or name.endswith("_per_s")
    expected = weights(beside)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(alone).items())
    base = dict(load_causal_lm(policy, dtype=torch.float32).named_parameters())
    plain = {name: weight for name, weight in weights(alone).items() if "lora_" not in name}
    for name, weight in plain.items():
        assert torch.equal(weight, base[name.removeprefix("base_model.model.").replace(".base_layer", "")])
    assert all(weight.any() for name, weight in weights(alone).items() if "lora_B" in name)


class OwnModule(LightningModule):
    """A LightningModule with a model of peft."""

    def __init__(self, path: str) -> None:
        super().__init__()
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(3)
        self.model = peft.get_peft_model(load_causal_lm(path, dtype=torch.float32), settings)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.0, fused=True)


@pytest.mark.parametrize("as_module", [True, False])
def test_policy_given_as_a_peft_model_gets_the_weights_of_the_lora_option(policy: str, as_module: bool) -> None:
    own = OwnModule(policy)
    stage = policy_optimization(own if as_module else own.model)
    fit(stage, PROMPTS)
    assert set(stage.named_models()) == {"policy"}
    by_name = policy_optimization(policy, lora=LORA)
    fit(by_name, PROMPTS)
    expected = weights(by_name)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(stage).items())


def test_trained_adapter_of_a_given_model_needs_a_named_reference(policy: str) -> None:
    """The reference would be the base model, and not the policy at the start."""
    for as_module in (True, False):
        own = OwnModule(policy)
        with_random_adapter(own.model)
        given = own if as_module else own.model
        with pytest.raises(ConfigError, match=r"the adapter of the model is trained already.*reference=FOLDER"):
            fit(policy_optimization(given), PROMPTS)
        stage = policy_optimization(given, reference=policy)
        fit(stage, PROMPTS)
        assert set(stage.named_models()) == {"policy"}, "the base model is the policy without the adapter"


def test_critic_trains_a_separate_adapter(policy: str) -> None:
    critic = CriticConfig(optimizer=OptimizerConfig(lr=0.01), lora=LoraConfig(rank=2))
    stage = policy_optimization(policy, lora=LORA, critic=critic, algorithm=Algorithm(advantage="gae"))
    metrics = fit(stage, PROMPTS)
    assert has_adapter(stage.critic) and metrics["train/critic/loss"] > 0
    moved = {name for name, parameter in stage.critic.named_parameters() if parameter.requires_grad and parameter.any()}
    assert any("score" in name for name in moved) and any("lora_B" in name for name in moved)


def test_lora_with_reference_update_or_a_loaded_model_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match="the policy has an adapter, and the reference has none"):
        fit(policy_optimization(policy, lora=LORA), PROMPTS, ReferenceUpdate(every=1))
    with pytest.raises(ConfigError, match=r"wrap the model with peft\.get_peft_model"):
        policy_optimization(load_causal_lm(policy, dtype=torch.float32), lora=LORA)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_exports_the_adapter_weights_of_a_single_device(policy: str, tmp_path: Path, stage: int) -> None:
    run_ranks(zero_lora_worker.train, stage, policy, tmp_path, world_size=1)
    exported = load_file(tmp_path / "policy" / "model.safetensors")
    stage_of_one = zero_lora_worker.stage_of(policy)
    fit(stage_of_one, PROMPTS)
    expected = dict(plain_weights(ModuleWeightSource(stage_of_one.policy), stage_of_one.policy))
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)
