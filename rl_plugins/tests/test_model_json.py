from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    Ernie4_5_MoeConfig,
    GPT2Config,
    HunYuanMoEV1Config,
    KimiLinearConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from rl_plugins.model_json import chosen_experts, context_window, expert_count


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (Qwen2Config(max_position_embeddings=96).to_dict(), 96),
        (GPT2Config(n_positions=96).to_dict(), 96),
        ({"text_config": {"max_position_embeddings": 96}, "max_position_embeddings": 8}, 96),
        ({"max_position_embeddings": 32, "rope_parameters": {"rope_type": "yarn", "factor": 3.0}}, 96),
        ({"max_seq_len": 96}, 96),
        ({"model_type": "bloom"}, None),
    ],
)
def test_context_window_is_the_longest_sequence_of_a_model(config: dict[str, Any], window: int | None) -> None:
    assert context_window(config) == window


@pytest.mark.parametrize("make", [Qwen3MoeConfig, Ernie4_5_MoeConfig, KimiLinearConfig, HunYuanMoEV1Config])
def test_expert_count_and_chosen_experts_of_families_with_other_keys(make: Any) -> None:
    config = make()
    assert expert_count(config.to_dict()) == config.num_experts > 0
    assert chosen_experts({"text_config": config.to_dict()}) == config.num_experts_per_tok > 0
    assert expert_count(Qwen2Config().to_dict()) == chosen_experts(Qwen2Config().to_dict()) == 0
