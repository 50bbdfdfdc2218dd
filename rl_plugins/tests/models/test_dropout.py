"""Dropout of a model that is turned off."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_plugins.models.dropout import turn_off_dropout
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples, tiny

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


def test_turn_off_dropout_gives_phimoe_equal_log_probs_in_each_pass() -> None:
    # Experts take no float64. With little noise, a router chooses only among experts of almost the same score.
    model = tiny("Phimoe", num_local_experts=4, router_jitter_noise=0.5).float()
    batch = batch_of(random_samples((3, 8), (5, 9)))

    def log_probs() -> torch.Tensor:
        with torch.no_grad():
            return response_log_probs(model, **forward_arguments(batch), packed=False).log_probs_BT

    expected = log_probs()
    model.train()
    assert not torch.equal(log_probs(), expected)
    turn_off_dropout(model)
    for change_mode in (model.train, model.eval, model.train):
        assert torch.equal(log_probs(), expected)
        change_mode()
    assert torch.equal(log_probs(), expected)
    # transformers checkpoints activations in train mode only.
    assert all(layer.training and layer.self_attn.training for layer in model.model.layers)
