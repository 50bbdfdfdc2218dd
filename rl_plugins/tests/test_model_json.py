from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config, Qwen2Config

from rl_plugins.model_json import context_window


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (Qwen2Config(max_position_embeddings=96).to_dict(), 96),
        (GPT2Config(n_positions=96).to_dict(), 96),
        ({"text_config": {"max_position_embeddings": 96}, "max_position_embeddings": 8}, 96),
        ({"max_position_embeddings": 32, "rope_parameters": {"rope_type": "yarn", "factor": 3.0}}, 96),
        ({"model_type": "bloom"}, None),
    ],
)
def test_context_window_is_the_longest_sequence_of_a_model(config: dict[str, Any], window: int | None) -> None:
    assert context_window(config) == window
