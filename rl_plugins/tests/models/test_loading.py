"""load_causal_lm refuses folders whose weights do not fit config.json; transformers would make up the weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from rl_plugins.errors import ConfigError
from rl_plugins.models.loading import experts_on_first_rank, load_causal_lm, without_weights
from rl_plugins.models.scalar_head import load_scalar_head
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


def test_experts_on_first_rank_reads_no_weights_of_experts_on_other_ranks(tmp_path: Path) -> None:
    tensors = {"layers.0.mlp.experts.1.up_proj.weight": torch.ones(2, 2), "layers.0.mlp.gate.bias": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    devices = []
    for rank in (1, 0):
        with experts_on_first_rank(rank):
            read = modeling_utils.load_state_dict(tmp_path / "model.safetensors")
        devices.append([read[name].device.type for name in tensors])
    assert devices == [["meta", "cpu"], ["cpu", "cpu"]]


def test_load_causal_lm_and_load_scalar_head_refuse_weights_that_are_not_finite(tmp_path: Path) -> None:
    folder = save_tiny_policy(tmp_path / "policy", hidden_size=16, num_heads=2, intermediate_size=16)
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    whole = load_file(file)
    message = f"^{folder}: {name} has weights that are NaN or infinite: download or export the model again, or name"
    for number in (float("nan"), float("inf"), -float("inf")):
        weight = whole[name].clone()
        weight[3, 5] = number
        save_file({**whole, name: weight}, file, metadata={"format": "pt"})
        for load in (load_causal_lm, load_scalar_head):
            for dtype in (torch.float32, torch.bfloat16):
                with pytest.raises(ConfigError, match=message):
                    load(str(folder), dtype=dtype)
        with without_weights():
            load_causal_lm(str(folder), dtype=torch.float32)
