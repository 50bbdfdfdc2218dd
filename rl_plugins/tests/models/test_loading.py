"""load_causal_lm refuses folders whose weights do not fit config.json; transformers would make up the weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_plugins.errors import ConfigError
from rl_plugins.models.loading import load_causal_lm, without_weights
from rl_plugins.models.tiny import save_tiny_policy


def test_load_causal_lm_names_a_missing_and_an_unfitting_weight(tmp_path: Path) -> None:
    folder = save_tiny_policy(tmp_path / "policy", hidden_size=16, num_heads=2, intermediate_size=16)
    file = folder / "model.safetensors"
    whole = load_file(file)
    load_causal_lm(str(folder), dtype=torch.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    for weights, message in (
        ({key: value for key, value in whole.items() if key != name}, f"1 weights of Qwen2ForCausalLM .* as {name}"),
        ({**whole, name: torch.ones(16, 8)}, f"{name} has the shape [16, 8], and config.json needs [16, 16]"),
    ):
        save_file(weights, file, metadata={"format": "pt"})
        expected = message if ".*" in message else re.escape(message)
        with pytest.raises(ConfigError, match=expected):
            load_causal_lm(str(folder), dtype=torch.float32)
        with without_weights(), pytest.raises(ConfigError, match=expected):
            load_causal_lm(str(folder), dtype=torch.float32)
