"""The user's LightningModule as a policy: its model, optimizer and schedules are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

SAMPLING = SamplingConfig(max_tokens=3, num_samples=2)


class Own(LightningModule):
    def __init__(self, path, interval="step", late=False):
        super().__init__()
        self.path, self.interval = path, interval
        self.model: Any = None
        if not late:
            self.configure_model()

    def configure_model(self):
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)

    def configure_optimizers(self):
        self.steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": self.scheduler, "interval": self.interval, "frequency": 2}]


def length(solution_str):
    return len(solution_str) % 7


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(save_tiny_policy(tmp_path_factory.mktemp("tiny")))


def fit(stage, path, steps):
    rows = addition_rows(below=10, num_train=8, num_test=1, seed=0)["train"]
    trainer = Trainer(
        max_steps=steps,
        strategy=SingleDeviceRolloutStrategy(rollout=TransformersRollout(path)),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(stage, datamodule=PromptDataModule(rows, tokenizer=path, prompts_per_step=4))
    return trainer


@pytest.mark.parametrize(("interval", "advances"), [("step", 3), ("epoch", 1)])
def test_scheduler_of_a_lightning_module_follows_interval_and_frequency(path, interval, advances):
    own = Own(path, interval)
    fit(PolicyOptimization(own, scorer=length, sampling=SAMPLING), path, steps=6)  # epochs of two steps
    assert own.scheduler.last_epoch == advances
    assert own.steps == 6


def test_model_made_in_configure_model_is_trained(path):
    own = Own(path, late=True)
    with pytest.raises(ConfigError, match="pass tokenizer="):
        PolicyOptimization(own, scorer=length, sampling=SAMPLING)
    tokenizer = PolicyOptimization(path, scorer=length, sampling=SAMPLING).tokenizer
    stage = PolicyOptimization(own, scorer=length, sampling=SAMPLING, tokenizer=tokenizer)
    before = AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight
    fit(stage, path, steps=1)
    assert stage.policy is own.model
    assert (own.model.get_input_embeddings().weight - before).abs().max() > 0


def test_lightning_module_without_an_optimizer_gets_the_optimizer_of_the_stage(path):
    class Bare(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    trainer = fit(PolicyOptimization(Bare(), scorer=length, sampling=SAMPLING), path, steps=1)
    assert isinstance(trainer.optimizers[0], torch.optim.AdamW)


@pytest.mark.parametrize(("packing", "attention"), [(True, "packed_sdpa"), (False, "sdpa")])
def test_packing_sets_the_attention_of_a_transformers_model(path, packing, attention):
    own = Own(path)
    stage = PolicyOptimization(own, scorer=length, sampling=SAMPLING, packing=packing)
    fit(stage, path, 1)
    assert own.model.config._attn_implementation == attention


def test_stop_token_ids_default_to_the_end_token_of_the_tokenizer(path):
    stage = PolicyOptimization(path, scorer=length, sampling=SAMPLING)
    end = (stage.tokenizer.eos_token_id,)
    assert stage.sampling_setup is not None
    assert stage.sampling.stop_token_ids == stage.sampling_setup.eval_sampling.stop_token_ids == end
    told = SamplingConfig(max_tokens=3, stop_token_ids=(7,))
    assert PolicyOptimization(path, scorer=length, sampling=told).sampling is told


def test_model_without_a_path_and_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no name_or_path to load a tokenizer from"):
        PolicyOptimization(build_model(), scorer=length, sampling=SAMPLING)
