from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.config.rollout import check_cpu_engine
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
