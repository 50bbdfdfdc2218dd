"""Linear layers with 4-bit weights under an adapter: outputs, gradients, weights for engines, states and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rl_plugins import extras
from rl_plugins.config.models import LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.four_bit import FourBitLinear, four_bit_layers, quantize_layer
from rl_plugins.models.lora import MergedWeightSource, adapter_off, add_adapter
from rl_plugins.models.tiny import build_model
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.weights.source import ModuleWeightSource

NF4 = LoraConfig(rank=4, alpha=8.0, quantization="nf4")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 99}
TOKENS = torch.arange(24).view(2, 12) * 7 % 90


@pytest.fixture
def library() -> Any:
    """The functions of bitsandbytes."""
    return pytest.importorskip("bitsandbytes.functional")


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    model: Any = build_model(**SIZES)
    return model.to(dtype)


def adapted(dtype: torch.dtype = torch.float32) -> Any:
    return with_random_adapter(add_adapter(model_of(dtype), NF4))


def random_layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    # The last block has fewer numbers than the other blocks.
    return nn.Linear(100, 33, bias=bias, dtype=dtype)


def test_layer_has_half_a_byte_for_a_number_and_scales(library: Any) -> None:
    base = random_layer()
    layer = FourBitLinear(base)
    assert layer.weight.nbytes == base.weight.numel() / 2 and not layer.weight.requires_grad
    assert layer.scales.nbytes == math.ceil(base.weight.numel() / 64)
    assert layer.scale_sizes.nbytes == 4 and layer.bias is base.bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_equal_the_numbers_of_bitsandbytes_in_every_part(library: Any, dtype: torch.dtype) -> None:
    base = random_layer(dtype=dtype)
    layer = FourBitLinear(base)
    codes, state = library.quantize_4bit(base.weight.detach(), quant_type="nf4", compress_statistics=True)
    expected = library.dequantize_4bit(codes, state)
    assert torch.equal(layer.whole_weight(), expected) and expected.dtype == dtype
    assert 0.01 < (expected - base.weight).norm() / base.weight.norm() < 0.12
    codes, numbers = layer.weight.flatten(), expected.flatten()
    for start, end in ((0, 7), (31, 33), (32, 64), (50, 50), (len(codes) - 5, len(codes))):
        assert torch.equal(layer.numbers(codes[start:end], start), numbers[2 * start : 2 * end])


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_equal_a_plain_layer(library: Any, bias: bool) -> None:
    layer, plain = FourBitLinear(random_layer(bias)), random_layer(bias)
    plain.weight.data, plain.bias = layer.whole_weight(), layer.bias
    inputs = [torch.randn(2, 5, 100).requires_grad_() for _ in range(2)]
    inputs[1].data = inputs[0].data
    outputs = [one(x) for one, x in zip((layer, plain), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    # In autocast, and after a change of the model's dtype.
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(inputs[0]), plain(inputs[0]))
    weight = layer.whole_weight()
    assert torch.equal(layer.bfloat16().whole_weight(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_give_the_outputs_of_the_model_with_the_adapter(library: Any, dtype: torch.dtype) -> None:
    model, original, merged = adapted(dtype), model_of(dtype), model_of(dtype)
    source = MergedWeightSource(ModuleWeightSource(model), model)
    metadata = {meta.name: meta for meta in source.metadata()}
    weights = {name: tensor.clone() for name, tensor in source}
    for name, parameter in original.named_parameters():
        assert (metadata[name].dtype, metadata[name].shape) == (dtype, tuple(parameter.shape))
        assert (weights[name].dtype, weights[name].shape) == (dtype, parameter.shape)
        assert metadata[name].frozen == (not name.endswith("_proj.weight"))
    merged.load_state_dict(weights, strict=False)
    with torch.no_grad():
        got, expected = (one(input_ids=TOKENS).logits for one in (model, merged))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 if dtype == torch.float32 else 0.1)
        assert torch.equal(model.eval()(input_ids=TOKENS).logits, got)
        with adapter_off(model):
            base = model(input_ids=TOKENS).logits
        distance = (base - original(input_ids=TOKENS).logits).norm() / base.norm()
    assert 0.001 < float(distance) < 0.3


def test_shards_of_merged_weights_tile_the_weights(library: Any) -> None:
    model = adapted()
    whole = {name: tensor.flatten().clone() for name, tensor in MergedWeightSource(ModuleWeightSource(model), model)}
    tiled = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    for rank in range(3):
        for name, start, part in MergedWeightSource(ModuleWeightSource(model, rank, 3), model).shards():
            assert tiled[name][start : start + len(part)].isnan().all()
            tiled[name][start : start + len(part)] = part
    assert all(torch.equal(tiled[name], tensor) for name, tensor in whole.items())


def test_state_dict_leaves_the_codes_out(library: Any) -> None:
    model = adapted()
    state = model.state_dict()
    names = dict(model.named_parameters()).keys()
    assert names - state.keys() == four_bit_layers(model).keys()
    assert not any("scale" in name for name in state)
    other = add_adapter(model_of(), NF4)
    other.load_state_dict(state)
    assert torch.equal(other(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_adapter_files_refuse_an_adapter_over_four_bits(library: Any) -> None:
    model = adapted()
    source = MergedWeightSource(ModuleWeightSource(model), model)
    with pytest.raises(ConfigError, match="vLLM would apply the adapter to other weights: use lora_rank=0"):
        source.adapter_files()


def test_layers_without_weights_have_the_shapes_of_layers_with_weights(library: Any) -> None:
    with torch.device("meta"):
        empty = {**dict((layer := FourBitLinear(random_layer())).named_parameters()), **dict(layer.named_buffers())}
    whole = FourBitLinear(random_layer())
    for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
        assert empty[name].is_meta and (empty[name].shape, empty[name].dtype) == (tensor.shape, tensor.dtype)
    assert empty.keys() == {*dict(whole.named_parameters()), *dict(whole.named_buffers())}


@for_each(
    ("layer", "message"),
    [
        (nn.Linear(3, 5), r"q_proj \(Linear\) is not a linear layer with an even number of weights"),
        (nn.Bilinear(4, 4, 4), r"q_proj \(Bilinear\) is not a linear layer .* out of target_modules"),
        (nn.Linear(4, 4, dtype=torch.float64), r"weights of torch.float64: use Trainer\(precision='32-true'\)"),
    ],
)
def test_quantize_layer_needs_a_plain_linear_layer(monkeypatch: pytest.MonkeyPatch, layer: Any, message: str) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    layer.in_features, layer.out_features = getattr(layer, "in_features", 4), layer.out_features
    adapter = nn.Module()
    adapter.base_layer = layer
    with pytest.raises(ConfigError, match=message):
        quantize_layer(adapter, "q_proj")


def test_add_adapter_refuses_four_bits_for_layers_of_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10))
        with pytest.raises(ConfigError, match=r"transformer\.h\.0\.attn\.c_attn \(Conv1D\) is not a linear layer"):
            add_adapter(model, NF4)


def test_quantize_layer_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'rl-plugins\[bitsandbytes\]'"):
        add_adapter(model_of(), NF4)
