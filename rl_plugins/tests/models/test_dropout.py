"""Dropout of a model that is turned off."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_plugins.models.dropout import turn_off_dropout

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("qwen2", {"intermediate_size": 16, "num_key_value_heads": 2, "attention_dropout": 0.5}),
        ("opt", {"ffn_dim": 16, "word_embed_proj_dim": 16, "dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.9}),
        ("gpt_neox", {"intermediate_size": 16, "hidden_dropout": 0.5, "attention_dropout": 0.5}),
    ],
)
def test_turn_off_dropout_makes_train_mode_equal_to_evaluation_mode(family: str, options: dict[str, float]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **options}))
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        expected = model.eval()(ids).logits
        assert not torch.allclose(model.train()(ids).logits, expected)
        turn_off_dropout(model)
        assert torch.allclose(model(ids).logits, expected)
