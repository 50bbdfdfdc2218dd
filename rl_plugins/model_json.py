"""JSON files of a model's folder, above all config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.text_file import read_json_object

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "n_positions",
)  # fmt: skip
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts. Files of one family may have different keys."""
_CHOSEN_KEYS = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk", "top_k_experts",
)  # fmt: skip
_WINDOW_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
AGAIN = "download or export the model again"
"""Way out for a damaged file."""


def read_model_config(file: Path) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises:
        ConfigError: the file is damaged, or a size in the file is not a whole number above 0.
    """
    config = read_json_object(file, AGAIN)
    for key in ("text_config", "rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), dict | None):
            raise ConfigError(f"{file}: {key} is {str(config[key])[:40]!r}, not a mapping: {AGAIN}")
    for part in (config, config.get("text_config") or {}):
        for key in _SIZES:
            size = part.get(key)
            if size is not None and (type(size) is not int or size < 1):
                raise ConfigError(f"{file}: {key} is {str(size)[:40]!r}, not a whole number above 0: {AGAIN}")
    return config


def reads_images(config: Mapping[str, Any]) -> bool:
    """Return True if a config.json is that of a vision-language model."""
    return isinstance(config.get("vision_config"), Mapping)


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts in a sparse layer of a model; 0 if the model is no mixture of experts."""
    text = config.get("text_config") or config
    return next((text[key] for key in EXPERT_COUNT_KEYS if isinstance(text.get(key), int) and text[key]), 0)


def chosen_experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts that compute a token in a sparse layer; 0 if the config.json does not name it."""
    text = config.get("text_config") or config
    return next((text[key] for key in _CHOSEN_KEYS if isinstance(text.get(key), int)), 0)


def rotary_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of the rotary positions of a model; older files have another key for them."""
    text = config.get("text_config") or config
    return text.get("rope_parameters") or text.get("rope_scaling") or {}


def context_window(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence of a model in tokens; None if its config.json does not contain the length."""
    text = config.get("text_config") or config
    positions = next((text[key] for key in _WINDOW_KEYS if isinstance(text.get(key), int)), None)
    if positions is None:
        return None
    # Some models give the length before rotary scaling, others the length after it. The larger length refuses no valid
    # configuration.
    factor = rotary_parameters(config).get("factor")
    return int(positions * factor) if isinstance(factor, int | float) and 1 < factor < math.inf else positions
