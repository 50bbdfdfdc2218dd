"""Tiny models of many families of transformers, with random weights and the tokenizer of `rl_plugins.models.tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_plugins.models.tiny import build_tokenizer

LENGTH = 256
"""Longest sequence of a tiny model, in tokens."""

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT_ATTENTION = {
    "kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "head_dim": 64,
    # As in the files of DeepSeek-V3; vLLM reads both.
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
_WINDOW = {"sliding_window": 16}
_WINDOW_AND_WHOLE = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": _WINDOW,
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {**_WINDOW, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3_text": {**_WINDOW_AND_WHOLE, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "phi3": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "olmo2": {},
    "olmo3": _WINDOW_AND_WHOLE,
    "granite": {
        "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    },
    "smollm3": {},
    "cohere2": {**_WINDOW_AND_WHOLE, "tie_word_embeddings": True},
    "exaone4": _WINDOW_AND_WHOLE,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "mixtral": _LOCAL_EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 96},
    "qwen3_moe": _EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _ROUTED_EXPERTS,
    "deepseek_v3": {**_ROUTED_EXPERTS, **_LATENT_ATTENTION},
    "gpt_oss": {**_LOCAL_EXPERTS, **_WINDOW_AND_WHOLE},
    "qwen3_next": {
        **_EXPERTS, "shared_expert_intermediate_size": 96, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
    },
    "granitemoehybrid": {
        **_MAMBA, **_LOCAL_EXPERTS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 96,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_dim": 128, "block_dim": 128},
}  # fmt: skip
"""Options of the configuration of each family, by the name of the family in transformers, beside the common sizes."""
RECURRENT = ("qwen3_next", "granitemoehybrid", "lfm2")
"""Families with recurrent layers, whose state runs through a whole row."""
UNPACKED = (*RECURRENT, "gpt_oss")
"""Families without packing: gpt-oss has attention with sinks."""


def save_tiny_family(family: str, folder: Path) -> Any:
    """Save a tiny model of a family and its tokenizer for `from_pretrained`, and return the model."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    tokenizer = build_tokenizer()
    options = {"tie_word_embeddings": False, **text_sizes(tokenizer), **FAMILIES[family]}
    config = CONFIG_MAPPING[family](**options, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.model_max_length = LENGTH
    tokenizer.save_pretrained(folder)
    return model


def text_sizes(tokenizer: Any) -> dict[str, Any]:
    """Return the common options of the configuration of a tiny model of text, for a tokenizer."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # The engine's attention on CPU needs heads of width 32 or more.
        "head_dim": 32,
        "max_position_embeddings": LENGTH,
        "initializer_range": 0.08,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
