"""Options of 4-bit weights: refused before a model is loaded, with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config

from rl_plugins import extras
from rl_plugins.config.checks import check_options
from rl_plugins.config.models import LoraConfig
from rl_plugins.config.rollout import check_engine_adapter
from rl_plugins.launch.algorithm_check import check_adapter
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.loops import for_each

BASE = ("model.path=model", "model.lora.quantization=nf4", "model.lora.rank=4", "rollout.lora=merged")
CRITIC = ("critic.lora.quantization=nf4", "critic.lora.rank=4")
CONFIG = LoraConfig(quantization="nf4")


@for_each(
    ("recipe", "options"),
    [
        ("grpo", BASE),
        ("grpo", (*BASE, "strategy.zero_stage=2")),
        ("grpo", (*BASE, "strategy.name=fsdp", "run.export_lora=adapter")),
        ("grpo", (*BASE, "reference.path=other", "placement.reference.actors=1")),
        ("grpo", ("launcher=local", "rollout.engine=transformers", *BASE[:-1])),
        ("ppo", ("model.path=model", *CRITIC)),
        ("sft", BASE),
    ],
)
def test_check_options_of_four_bits_allow(recipe: str, options: tuple[str, ...]) -> None:
    check_options(configured(recipe, *options))


@for_each(
    ("options", "message"),
    [
        (("model.lora.rank=0",), "model.lora.quantization=nf4 is for weights under an adapter: give rank a value"),
        (("critic.lora.quantization=nf4",), "critic.lora.quantization=nf4 is for weights under an adapter"),
        (("model.lora.path=own/adapter",), "model.lora.path=own/adapter: not tried with quantization=nf4: leave"),
        (("model.lora.experts=true",), "model.lora.quantization=nf4: experts stay as they are: use experts=false"),
        (("model.lora.quantization=int4",), "model.lora.quantization=int4"),
        (("model.compile=true", "strategy.zero_stage=2"), "and model.compile=true have not been tried together"),
        (("model.liger=true",), "model.lora.quantization=nf4 and model.liger=true have not been tried"),
        (
            ("model.lora.quantization=null", *CRITIC, "model.liger=true"),
            "critic.lora.quantization=nf4 and model.liger=true have not been tried together: leave one of them out",
        ),
        (("strategy.name=fsdp", "strategy.tensor_parallel=2", "placement.num_workers=2"), "does not support adapters"),
        (("placement.reference.actors=1",), "leave the pool out, and the policy with its adapter off is the reference"),
        ((*CRITIC, "placement.critic.actors=1"), "critic.lora.quantization=nf4 and placement.critic"),
    ],
)
def test_check_options_of_four_bits_name_the_way_out(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    assert message in message_of(lambda: check_options(configured("grpo", *BASE, *options)))


def test_check_engine_adapter_refuses_four_bits() -> None:
    message = message_of(lambda: check_engine_adapter("model.path=model", {}, CONFIG))
    assert message.endswith("apply the adapter to weights that are not quantised: use rollout.lora=merged")


def test_check_adapter_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    message = message_of(lambda: check_adapter("model.lora", "model", CONFIG, trust_remote_code=False))
    assert message.startswith("model.lora.quantization=nf4: bitsandbytes is not installed: pip install 'rl-plugins[")


def test_check_adapter_adds_the_adapter_to_a_model_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    check_adapter("model.lora", str(save_tiny_policy(tmp_path / "policy")), CONFIG, trust_remote_code=False)
    GPT2Config(n_embd=8, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "gpt2")
    message = message_of(lambda: check_adapter("model.lora", str(tmp_path / "gpt2"), CONFIG, trust_remote_code=False))
    assert message.startswith(f"model.lora with {tmp_path}/gpt2: ")
    assert "h.0.attn.c_attn (Conv1D) is not a linear layer" in message
