from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.config.models import LoraConfig
from rl_plugins.config.rollout import RolloutConfig, check_cpu_engine
from rl_plugins.errors import ConfigError

HEADS: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 48, "num_attention_heads": 2}, "the attention heads have a width of 24, and vLLM on CPU"),
        (
            {**HEADS, "model_type": "deepseek_v3", "kv_lora_rank": 16},
            "for latent attention, vLLM on CPU computes other",
        ),
        ({"text_config": {**HEADS, "model_type": "lfm2"}}, "for models of the type lfm2, vLLM on CPU computes other"),
    ],
)
def test_check_cpu_engine_refuses_models_with_other_log_probs(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_cpu_engine("model.path=policy", config)


def test_check_cpu_engine_accepts_attention_of_a_known_width() -> None:
    check_cpu_engine("model.path=policy", {**HEADS, "model_type": "qwen2"})
    check_cpu_engine("model.path=policy", {"model_type": "qwen2", "kv_lora_rank": None})


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096},
    ],
)
def test_longrope_is_refused_above_the_length_of_short_sequences(engine: str, rotary: dict[str, Any]) -> None:
    """Above 4,096 tokens, an engine rotates all positions by its long factors, and a trainer those of long samples."""
    rollout, model = RolloutConfig(engine=engine), {**HEADS, "model_type": "phi3", **rotary}
    rollout.check_policy("model.path=phi", model, lora=LoraConfig(), tokens=4096, is_on_cpu=True)
    with pytest.raises(ConfigError, match=r"phi has the rotary positions longrope: above 4096 .* make 4097 tokens"):
        rollout.check_policy("model.path=phi", model, lora=LoraConfig(), tokens=4097, is_on_cpu=False)


def test_check_policy_refuses_weight_updates_on_gpus_without_the_experts() -> None:
    model, whole, adapter = {**HEADS, "model_type": "gpt_oss"}, LoraConfig(rank=0), LoraConfig(rank=4)

    def check(rollout: RolloutConfig, lora: LoraConfig, model: dict[str, Any] = model, *, is_on_cpu: bool) -> None:
        rollout.check_policy("model.path=policy", model, lora=lora, tokens=64, is_on_cpu=is_on_cpu)

    said = (
        r"policy: on GPUs, weight updates .* experts .* type gpt_oss: use rollout\.lora=adapter with model\.lora\.rank"
    )
    for rollout, lora in ((RolloutConfig(lora="adapter"), whole), (RolloutConfig(lora="merged"), adapter)):
        with pytest.raises(ConfigError, match=said):
            check(rollout, lora, is_on_cpu=False)
    check(RolloutConfig(lora="adapter"), adapter, is_on_cpu=False)
    check(RolloutConfig(engine="transformers"), whole, is_on_cpu=False)
    check(RolloutConfig(), whole, is_on_cpu=True)
    for is_on_cpu in (True, False):
        with pytest.raises(ConfigError, match=r"weight updates .* other shapes .* type qwen3_vl_moe: use rollout"):
            check(RolloutConfig(), whole, {**HEADS, "model_type": "qwen3_vl_moe"}, is_on_cpu=is_on_cpu)
    check(RolloutConfig(), whole, {**HEADS, "model_type": "qwen3_moe"}, is_on_cpu=False)
