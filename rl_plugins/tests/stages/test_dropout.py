"""Dropout of stages: off where log-probs are compared, on elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from transformers import AutoModelForCausalLM

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import CriticConfig, LoraConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.preference_optimization import PreferenceOptimization
from rl_plugins.stages.sft import SFT
from rl_plugins.stages.stage import Stage
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.stages import canned

SAMPLING = SamplingConfig(max_tokens=3, num_samples=2)


def length(solution_str: str) -> float:
    return len(solution_str) % 7


@pytest.fixture
def path(tmp_path: Path) -> str:
    folder = save_tiny_policy(tmp_path / "policy", initializer_range=0.2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    return str(folder)


def loaded(stage: Stage) -> Any:
    """Load the model of a stage as `Trainer.fit` does."""
    stage.trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy())
    stage.configure_model()
    return stage.policy


def test_policy_optimization_compares_log_probs_without_dropout(path: str, tmp_path: Path) -> None:
    stage = PolicyOptimization(path, scorer=length, sampling=SAMPLING, gradient_checkpointing=True)
    trainer: Trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=TransformersRollout(path)), max_steps=1)
    rows = addition_rows(below=10, num_train=8, num_test=1, seed=0)["train"]
    trainer.fit(stage, datamodule=PromptDataModule(rows, tokenizer=path, prompts_per_step=4))
    assert float(trainer.callback_metrics["train/rollout_gap"]) < 1e-4
    # Gradient checkpointing of transformers needs train mode.
    assert stage.policy.training
    stage.export(tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["attention_dropout"] == 0.5


def test_preference_optimization_has_no_dropout_and_sft_keeps_dropout(path: str) -> None:
    options: dict[str, Any] = {"scorer": length, "eval_sampling": SAMPLING}
    compared = loaded(PreferenceOptimization(path, loss="orpo", **options))
    assert {block.self_attn.attention_dropout for block in compared.model.layers} == {0.0}
    alone = loaded(SFT(path, **options))
    assert {block.self_attn.attention_dropout for block in alone.model.layers} == {0.5}


def test_model_in_evaluation_mode_trains_in_train_mode_where_log_probs_are_compared(path: str) -> None:
    given = AutoModelForCausalLM.from_pretrained(path)
    assert not given.training
    policy = loaded(PolicyOptimization(given, scorer=length, sampling=SAMPLING))
    assert policy is given and all(module.training for module in policy.modules())
    assert {block.self_attn.attention_dropout for block in policy.model.layers} == {0.0}


def test_dropout_of_an_adapter_is_refused_where_log_probs_are_compared(path: str) -> None:
    lora = LoraConfig(rank=2, dropout=0.1)
    with pytest.raises(ConfigError, match=r"lora.dropout=0.1: PolicyOptimization compares log-probs.*leave"):
        PolicyOptimization(path, scorer=length, sampling=SAMPLING, lora=lora)
    SFT(path, scorer=length, eval_sampling=SAMPLING, lora=lora)


def test_sampling_from_another_distribution_than_the_policy_gives_a_warning(path: str) -> None:
    sampling = SamplingConfig(max_tokens=3, num_samples=2, top_p=0.9)
    with pytest.warns(UserWarning, match="sampling with top_p=0.9: the loss uses the whole distribution"):
        PolicyOptimization(path, scorer=length, sampling=sampling)


def test_critic_has_no_dropout(path: str) -> None:
    """Values before the update are compared with values in the update."""
    stage = PolicyOptimization(path, scorer=length, sampling=SAMPLING, algorithm=Algorithm(advantage="gae"))
    loaded(stage)
    assert {block.self_attn.attention_dropout for block in stage.critic.model.layers} == {0.0}
    lora = LoraConfig(rank=2, dropout=0.1)
    with pytest.raises(ConfigError, match=r"critic.lora.dropout=0.1: the loss compares values of two passes.*leave"):
        PolicyOptimization(
            path,
            scorer=length,
            sampling=SAMPLING,
            algorithm=Algorithm(advantage="gae"),
            critic=CriticConfig(lora=lora),
        )
