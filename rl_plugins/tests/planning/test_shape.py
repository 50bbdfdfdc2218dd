"""Shapes against models of transformers, and activations against the tensors kept by autograd."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Idefics3Config,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Starcoder2Config,
)

from benchmarks.tiny_vision import save_tiny_vision
from rl_plugins.config.models import LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.model_json import read_model_config
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.lora import adapted_layers, add_adapter
from rl_plugins.models.packed_attention import use_packed_attention
from rl_plugins.planning.shape import shape_of
from rl_plugins.tests.cases import case
from rl_plugins.tests.loops import for_each

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 160}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SIZES, **HEADS),
        Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=True),
        Qwen3Config(**SIZES, **HEADS, head_dim=32),
        LlamaConfig(**SIZES, **HEADS),
        LlamaConfig(**SIZES, **HEADS, attention_bias=True, mlp_bias=True),
        MistralConfig(**SIZES, **HEADS),
        Gemma2Config(**SIZES, **HEADS, head_dim=32),
        Gemma3TextConfig(**SIZES, **HEADS, head_dim=32),
        Phi3Config(**SIZES, **HEADS, pad_token_id=0),
    ],
    ids=lambda config: config.model_type,
)
def test_shape_of_counts_the_parameters_of_the_model(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape_of(config.to_dict(), "it").parameters == sum(p.numel() for p in model.parameters())


UNGATED = [
    ApertusConfig(**SIZES, **HEADS, pad_token_id=0),
    ArceeConfig(**SIZES, **HEADS, mlp_bias=True),
    GPTNeoXConfig(**SIZES, num_attention_heads=4),
    NemotronConfig(**SIZES, **HEADS),
    PhiConfig(**SIZES, **HEADS),
    Starcoder2Config(**SIZES, **HEADS),
]


@for_each("config", UNGATED)
def test_shape_of_counts_the_matrices_of_an_mlp_without_gate(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_diff_dict(), "it")
    # Biases are left out.
    assert shape.large(1_000) == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)


LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE: dict[str, Any] = {**SIZES, **HEADS, "head_dim": 24}
MIXTURES = [
    MixtralConfig(**SIZES, **HEADS, **LOCAL_EXPERTS),
    Qwen2MoeConfig(**SIZES, **HEADS, **EXPERTS, shared_expert_intermediate_size=48),
    Qwen3MoeConfig(**WIDE, **EXPERTS),
    Qwen3MoeConfig(**WIDE, **EXPERTS, mlp_only_layers=[1]),
    Qwen3MoeConfig(**WIDE, **EXPERTS, decoder_sparse_step=2),
    OlmoeConfig(**SIZES, **HEADS, num_experts=8, num_experts_per_tok=2, pad_token_id=0),
    Glm4MoeConfig(
        **WIDE, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        n_shared_experts=2, first_k_dense_replace=1, use_qk_norm=True,
    ),
    GptOssConfig(**SIZES, **HEADS, **LOCAL_EXPERTS, head_dim=24, pad_token_id=0),
]  # fmt: skip


@for_each("config", MIXTURES)
def test_shape_of_counts_the_parameters_of_a_mixture_and_of_the_experts_of_a_token(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict(), "it")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name and p.ndim == 3)
    # Two of eight experts for one token; all experts for many tokens.
    assert shape.multiplied - shape.multiplied_by(1) == pytest.approx(experts * 6 / 8)
    assert shape.multiplied_by(1000) == pytest.approx(shape.multiplied)
    assert shape.largest == max(p.numel() for p in model.parameters())
    for threshold in (5_000, 50_000):
        large = sum(p.numel() for p in model.parameters() if p.ndim > 1 and p.numel() > threshold)
        # A bias of all experts is a matrix, too, and small beside the experts.
        assert shape.large(threshold) == pytest.approx(large, rel=0.01)


VISION_LANGUAGE = [
    LlavaConfig(), Gemma3Config(), Qwen2VLConfig(), Qwen2_5_VLConfig(), Qwen3VLConfig(), Idefics3Config(),
]  # fmt: skip


@for_each("config", VISION_LANGUAGE)
def test_shape_of_counts_the_parameters_of_a_vision_tower(config):
    text = config.get_text_config()
    # The vocabulary must have all special tokens of the configuration.
    text.num_hidden_layers, text.vocab_size = 1, 130_000
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    tower = shape_of(config.to_dict(), "it").tower
    assert tower is not None
    weights = {name: p for name, p in model.named_parameters() if "language_model" not in name}
    weights = {name: p for name, p in weights.items() if "text_model" not in name and "lm_head" not in name}
    assert sum(tower.matrices) == pytest.approx(sum(p.numel() for p in weights.values()), rel=2e-3)


OF_ALL_SIZES = ("qwen2_5_vl", "qwen3_vl")
"""Families whose towers take images of all sizes."""


def image_inputs(family, patches, config):
    """Return the inputs of `get_image_features` for two images of some patches, which are squares."""
    side, size = patches**0.5, config.vision_config.patch_size
    if family in OF_ALL_SIZES:
        pixels = torch.rand(2 * patches, 3 * config.vision_config.temporal_patch_size * size**2)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, int(side), int(side)]] * 2)}
    images = torch.rand(2, 3, int(side) * size, int(side) * size)
    return {"pixel_values": images[None] if family == "idefics3" else images}


# An image of 256 patches has four windows of 64 patches.
@for_each(
    ("family", "patches"),
    [("llava", 16), ("gemma3", 16), ("qwen2_5_vl", 64), ("qwen2_5_vl", 256), ("qwen3_vl", 64), ("idefics3", 16)],
)
def test_forward_flops_of_a_tower_are_the_operations_that_torch_counts(family, patches, tmp_path):
    model = save_tiny_vision(family, tmp_path / f"{family}{patches}").train()
    # Torch does not count the fused attention of a CPU.
    model.set_attn_implementation("eager")
    tower = shape_of(read_model_config(tmp_path / f"{family}{patches}" / "config.json"), "it").tower
    assert tower is not None and (family in OF_ALL_SIZES or tower.patches == patches)
    with FlopCounterMode(display=False) as forward:
        found = model.base_model.get_image_features(**image_inputs(family, patches, model.config))
    features = [*found.pooler_output, *(one for layer in found.get("deepstack_features", ()) for one in layer)]
    # The head of SigLIP multiplies one row for each image, which is left out.
    assert 2 * tower.forward_flops(patches) == pytest.approx(forward.get_total_flops(), rel=0.03)
    with FlopCounterMode(display=False) as backward:
        sum(feature.sum() for feature in features).backward()
    # The pixels need no gradient, and nothing reads the output of the head: a large share of a tower of two blocks.
    assert backward.get_total_flops() == pytest.approx(2 * forward.get_total_flops(), rel=0.2)


@for_each("family", ["llava", "gemma3", "qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_shape_of_counts_adapter_and_tied_embedding_of_a_vision_language_model(family, tmp_path):
    model = save_tiny_vision(family, tmp_path / family)
    shape = shape_of(read_model_config(tmp_path / family / "config.json"), "it")
    assert shape.parameters == pytest.approx(model.num_parameters(), rel=1e-2)
    adapted = add_adapter(model, LoraConfig(rank=4))
    assert shape.adapter(4) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@for_each("config", [LlavaConfig(), Gemma3Config()])
def test_shape_of_knows_the_sizes_that_a_text_config_leaves_out(config):
    whole = config.to_dict()
    text = {key: whole["text_config"][key] for key in ("model_type", "hidden_size")}
    assert shape_of({**whole, "text_config": text}, "it") == shape_of(whole, "it")


def test_shape_of_names_the_missing_size_of_a_vision_tower():
    config = {**Qwen2Config(**SIZES, **HEADS).to_dict(), "vision_config": {"hidden_size": 64}}
    with pytest.raises(ConfigError, match="it: vision_config has no whole number for num_hidden_layers or depth: a"):
        shape_of(config, "it")


@for_each("config", [Qwen2Config(**SIZES, **HEADS), MIXTURES[0], MIXTURES[1], MIXTURES[2]])
def test_adapter_counts_the_trained_parameters_of_peft(config):
    adapted = add_adapter(AutoModelForCausalLM.from_config(config), LoraConfig(rank=4))
    parameters = dict(adapted.named_parameters())
    below = sum(parameters[name].numel() for name in adapted_layers(adapted))
    layers = shape_of(config.to_dict(), "it").adapted_layers
    assert below == config.num_hidden_layers * sum(before * after for before, after in layers)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert shape_of(config.to_dict(), "it").adapter(4) == trained


@for_each("config", MIXTURES[:3])
def test_adapter_counts_the_experts_of_peft(config):
    model = AutoModelForCausalLM.from_config(config)
    adapted = add_adapter(model, LoraConfig(rank=4, experts=True))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert shape_of(config.to_dict(), "it").adapter(4, with_experts=True) == trained


def kept_by_autograd(config, dtype, *, same_prompt):
    """Return the bytes of the tensors kept by a packed pass for the backward pass, without parameters."""
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    use_packed_attention(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # alive: no other storage takes its address
        return tensor

    ids = torch.randint(0, config.vocab_size, (4, 64))
    if same_prompt:
        ids[:, :56] = ids[0, :56]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        response_log_probs(
            model,
            input_ids_BS=ids,
            attention_mask_BS=torch.ones_like(ids),
            position_ids_BS=torch.arange(64).expand(4, 64),
            response_width=8,
            packed=True,
        )
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    "family", [Qwen2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig], ids=lambda family: family.model_type
)
def test_activation_bytes_are_the_bytes_that_autograd_keeps(family):
    for dtype, same_prompt in product((torch.float32, torch.bfloat16), (False, True)):
        with case(f"{dtype}, {same_prompt=}"):
            check_activations(family, dtype, same_prompt=same_prompt)


def check_activations(family, dtype, *, same_prompt):
    experts = EXPERTS if family is Qwen3MoeConfig else {}

    def config(layers):
        return family(**{**SIZES, "num_hidden_layers": layers}, **HEADS, **experts, head_dim=24)

    three_blocks, one_block = (kept_by_autograd(config(layers), dtype, same_prompt=same_prompt) for layers in (3, 1))
    tokens = 56 + 4 * 8 if same_prompt else 4 * 64
    found = shape_of(config(1).to_dict(), "it").activation_bytes(dtype.itemsize, copies=4 * 64 / tokens)
    assert found == pytest.approx((three_blocks - one_block) / 2 / tokens, rel=0.02)


def test_shape_of_refuses_missing_sizes_and_experts_by_name():
    with pytest.raises(ConfigError, match="it has no whole number for hidden_size and vocab_size"):
        shape_of({"num_hidden_layers": 1, "intermediate_size": 1, "num_attention_heads": 1}, "it")
    with pytest.raises(ConfigError, match=r"it: n_routed_experts=8: plans know the experts of glm4_moe.*not of"):
        shape_of({**SIZES, **HEADS, "model_type": "deepseek_v3", "n_routed_experts": 8}, "it")
    with pytest.raises(ConfigError, match="it has no whole number for num_experts_per_tok: a plan needs these"):
        shape_of({**SIZES, **HEADS, "model_type": "mixtral", "num_local_experts": 8}, "it")
