"""Layers with 8-bit products: the chosen layers, their weights, and refused devices and models."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rl_plugins import extras
from rl_plugins.config.models import LoraConfig
from rl_plugins.models import float8
from rl_plugins.models.float8 import check_float8, has_float8, plain_products, use_float8
from rl_plugins.models.loading import load_causal_lm, options_for
from rl_plugins.models.lora import with_adapter
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.tests.launch.configurations import message_of
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.emulated_float8 import emulated_float8

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2}


@for_each("load", [load_causal_lm, load_scalar_head])
def test_weights_keep_names_shapes_and_dtypes(tmp_path: Path, load: Any) -> None:
    pytest.importorskip("torchao")
    path = str(save_tiny_policy(tmp_path / "policy", **SIZES))
    plain = load(path, dtype=torch.bfloat16)
    with emulated_float8():
        model = load(path, dtype=torch.bfloat16, float8="rowwise", gradient_checkpointing=True)
    assert has_float8(model) and model.training and not has_float8(plain)
    kept = model.state_dict()
    assert list(kept) == list(plain.state_dict())
    for name, weight in plain.state_dict().items():
        assert kept[name].dtype == weight.dtype and torch.equal(kept[name], weight), name
    kinds = {name: type(layer).__name__ for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    heads = {"lm_head", "score"} & kinds.keys()
    assert len(heads) == 1 and {kinds.pop(head) for head in heads} == {"Linear"}
    # Two blocks with seven layers.
    assert list(kinds.values()) == ["Float8Linear"] * 14


def test_use_float8_leaves_layers_with_other_sizes() -> None:
    pytest.importorskip("torchao")
    model = build_model(**SIZES | {"intermediate_size": 49})
    with emulated_float8():
        use_float8(model, "tensorwise")
    assert {type(layer).__name__ for layer in model.model.layers[0].mlp.children()} >= {"Linear"}
    assert type(model.model.layers[0].self_attn.o_proj).__name__ == "Float8Linear"


def test_plain_products_have_the_outputs_without_rounding() -> None:
    pytest.importorskip("torchao")
    model, ids = build_model(**SIZES), torch.arange(9)[None]
    expected = model(input_ids=ids).logits
    with emulated_float8():
        use_float8(model, "tensorwise")
    with plain_products(model):
        assert torch.equal(model(input_ids=ids).logits, expected)
    rounded = model(input_ids=ids).logits
    assert not torch.equal(rounded, expected)
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0.1 * float(expected.abs().max()))


def test_use_float8_refuses_models_without_fitting_layers_and_adapters() -> None:
    pytest.importorskip("torchao")
    mixture = build_model(**SIZES)
    mixture.config.num_experts = 4
    assert "mixtures of experts such as Qwen2ForCausalLM" in message_of(lambda: use_float8(mixture, "rowwise"))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=16, n_layer=1, n_head=2))
    assert "no block of GPT2LMHeadModel has a linear layer" in message_of(lambda: use_float8(gpt2, "rowwise"))
    model = build_model(**SIZES)
    with emulated_float8():
        use_float8(model, "rowwise")
    message = message_of(lambda: with_adapter(model, LoraConfig(rank=2)))
    assert message == "lora has not been tried with float8: leave one of them out"


def test_frozen_models_keep_plain_products() -> None:
    assert options_for("reference", {"float8": "rowwise", "attention": None}) == {"float8": None, "attention": None}
    assert options_for(None, {"float8": "rowwise"}) == {"float8": "rowwise"}


@for_each(
    ("scales", "installed", "capability", "message"),
    [
        ("e4m3", True, (9, 0), "float8=e4m3 is unknown: use one of tensorwise, rowwise"),
        ("rowwise", False, (9, 0), "float8=rowwise: torchao is not installed: pip install 'rl-plugins[torchao]', or"),
        ("rowwise", True, None, "float8=rowwise: 8-bit products need a GPU, and CUDA finds none here: leave float8"),
        ("rowwise", True, (8, 6), "compute capability 8.9 or more, and this GPU has 8.6: leave float8 out"),
        ("rowwise", True, (8, 9), "nothing is refused"),
    ],
)
def test_check_float8_names_the_missing_part(
    scales: str, installed: bool, capability: tuple[int, int] | None, message: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras, "find_spec", lambda name: ModuleSpec(name, None) if installed else None)
        patch.setattr(float8, "float8_config", lambda name: SimpleNamespace(emulate=False))
        patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        assert message in message_of(lambda: check_float8(scales))
