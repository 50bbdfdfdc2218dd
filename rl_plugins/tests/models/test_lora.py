"""LoRA: only the adapter is trained, and merged weights compute the outputs of the model with the adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rl_plugins.config.models import LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.export import save_adapter, save_policy
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.lora import (
    MergedWeightSource,
    adapted_layers,
    adapter_off,
    add_adapter,
    has_adapter,
    plain_weights,
)
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import build_model, build_tokenizer, save_tiny_policy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models import lora_worker
from rl_plugins.tests.models.lora_worker import CONFIG
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.weights.source import ModuleWeightSource

TOKENS = torch.arange(3, 19).reshape(2, 8)
INPUTS: dict[str, Any] = {
    "input_ids_BS": TOKENS,
    "attention_mask_BS": torch.ones_like(TOKENS),
    "position_ids_BS": torch.arange(8).expand(2, 8),
    "response_width": 5,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("policy"), initializer_range=0.2))


def adapted(policy: str, dtype: torch.dtype = torch.float32) -> peft.PeftModel:
    return with_random_adapter(add_adapter(load_causal_lm(policy, dtype=dtype), CONFIG))


def log_probs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return response_log_probs(model, **INPUTS).log_probs_BT


def merged(model: nn.Module) -> dict[str, Tensor]:
    return dict(plain_weights(ModuleWeightSource(model), model))


def test_new_adapter_and_adapter_off_give_the_base_model_bit_for_bit(policy: str) -> None:
    plain = log_probs(load_causal_lm(policy, dtype=torch.float32))
    model = add_adapter(load_causal_lm(policy, dtype=torch.float32), CONFIG)
    assert has_adapter(model) and not has_adapter(model.get_base_model())
    assert torch.equal(log_probs(model), plain)
    with_random_adapter(model)
    assert float((log_probs(model) - plain).abs().max()) > 0.1
    # As in a vision tower that does not learn.
    next(parameter for name, parameter in model.named_parameters() if ".lora_A." in name).requires_grad_(False)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with adapter_off(model):
        assert not model.training
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
        assert torch.equal(log_probs(model), plain)
    assert model.training
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained


def test_gradients_reach_only_the_adapter(policy: str) -> None:
    model = adapted(policy)
    log_probs(model)
    with torch.no_grad(), adapter_off(model):
        model(input_ids=TOKENS)
    response_log_probs(model, **INPUTS).log_probs_BT.sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(with_gradient) == 2 * len(adapted_layers(model)) == 2 * 2 * 7
    assert all(".lora_A." in name or ".lora_B." in name for name in with_gradient)
    assert all(model.get_parameter(name).grad.any() for name in with_gradient)  # type: ignore[union-attr]


def test_merged_weight_source_gives_the_log_probs_of_the_adapter(policy: str) -> None:
    model = adapted(policy)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights = merged(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    plain = build_model(initializer_range=0.2)
    assert list(weights) == [name for name, _ in plain.named_parameters()]
    moved = {name for name, weight in plain.named_parameters() if not torch.equal(weight, weights[name])}
    assert moved == {name for name in weights if name.endswith("proj.weight")}
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(log_probs(plain), log_probs(model), rtol=0, atol=1e-5)
    merged_by_peft = model.merge_and_unload()
    for name, weight in merged_by_peft.named_parameters():
        torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-6)


def test_merged_weight_source_rounds_bfloat16_once(policy: str) -> None:
    model = adapted(policy, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    name = "model.layers.1.mlp.up_proj.weight"
    layer = adapted_layers(model)["base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"]
    A, B = (factor["default"].weight.float() for factor in (layer.lora_A, layer.lora_B))
    exact = layer.base_layer.weight.float() + 2.0 * B @ A
    assert torch.equal(merged(model)[name], exact.bfloat16())


@for_each("world_size", [1, 2, 3, 7])
def test_merged_weight_source_shards_of_all_ranks_tile_the_weights(policy: str, world_size: int) -> None:
    model = adapted(policy)
    weights = merged(model)
    parts: dict[str, list[Tensor]] = {}
    for rank in range(world_size):
        source = MergedWeightSource(ModuleWeightSource(model, rank, world_size), model)
        shards = list(source.shards())
        assert [name for name, _, _ in shards] == [meta.name for meta in source.metadata()] == list(weights)
        for name, start, part in shards:
            assert start == sum(piece.numel() for piece in parts.setdefault(name, []))
            parts[name].append(part)
    for name, weight in weights.items():
        torch.testing.assert_close(torch.cat(parts[name]), weight.flatten(), rtol=1e-6, atol=1e-6)


def test_merged_weight_source_marks_weights_without_adapter_as_frozen(policy: str) -> None:
    model = adapted(policy)
    metadata = MergedWeightSource(ModuleWeightSource(model), model).metadata()
    assert {meta.name for meta in metadata if not meta.frozen} == {
        name for name in merged(model) if name.endswith("proj.weight")
    }
    plain = model.get_base_model()
    assert {meta.name: meta.shape for meta in metadata} == {
        name: tuple(weight.shape) for name, weight in build_model().named_parameters()
    }
    assert not any(meta.frozen for meta in plain_weights(ModuleWeightSource(plain), plain).metadata())


def test_merged_weight_source_of_transposed_gpt2_weights() -> None:
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    base = GPT2LMHeadModel(config).eval()
    model = with_random_adapter(add_adapter(base, LoraConfig(rank=2, target_modules=["c_attn", "c_fc"])))
    expected = model(input_ids=TOKENS % 16).logits
    plain = GPT2LMHeadModel(config).eval()
    plain.load_state_dict(merged(model), strict=False)
    torch.testing.assert_close(plain(input_ids=TOKENS % 16).logits, expected)


def test_add_adapter_trains_the_whole_scalar_head(policy: str, tmp_path: Path) -> None:
    model = add_adapter(load_scalar_head(policy, dtype=torch.float32), CONFIG)
    assert not model(input_ids=TOKENS).logits.any()
    with_random_adapter(model)
    trained = {name.rsplit(".", 1)[1] for name, p in model.named_parameters() if "score" in name and p.requires_grad}
    assert trained == {"weight", "bias"}
    weights = merged(model)
    assert {"score.weight", "score.bias"} < weights.keys()
    source = plain_weights(ModuleWeightSource(model), model)
    save_policy(model, source, build_tokenizer(), tmp_path / "reward_model", is_writer=True)
    again = load_scalar_head(str(tmp_path / "reward_model"), dtype=torch.float32, new_head=False)
    assert float(model(input_ids=TOKENS).logits.abs().max()) > 0.1
    torch.testing.assert_close(again(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_save_policy_and_save_adapter_load_with_transformers_and_peft(policy: str, tmp_path: Path) -> None:
    model = adapted(policy)
    source = MergedWeightSource(ModuleWeightSource(model), model)
    save_policy(model, source, build_tokenizer(), tmp_path / "merged", is_writer=True)
    save_adapter(model, source.adapter(), build_tokenizer(), tmp_path / "adapter", is_writer=True)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(log_probs(whole), log_probs(model), rtol=0, atol=1e-5)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(policy), tmp_path / "adapter")
    assert torch.equal(log_probs(again), log_probs(model))


def test_save_adapter_names_base_model_and_commit_of_the_hub(policy: str, tmp_path: Path) -> None:
    base, commit = load_causal_lm(policy, dtype=torch.float32), "0" * 40
    base.name_or_path = f"own/tiny@{commit}"
    model = add_adapter(base, CONFIG)
    source = MergedWeightSource(ModuleWeightSource(model), model)
    save_adapter(model, source.adapter(), build_tokenizer(), tmp_path / "adapter", is_writer=True)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("own/tiny", commit)


def test_adapter_of_the_language_model_is_that_of_all_linear_layers_of_a_model_of_text(policy: str) -> None:
    base = load_causal_lm(policy, dtype=torch.float32)
    model = add_adapter(base, LoraConfig(rank=2, target_modules="language-model"))
    other = add_adapter(load_causal_lm(policy, dtype=torch.float32), LoraConfig(rank=2))
    assert adapted_layers(model).keys() == adapted_layers(other).keys()


def test_add_adapter_refuses_missing_and_nonlinear_layers(policy: str) -> None:
    for targets, message in (
        (["nowhere"], "Target modules"),
        (["embed_tokens"], r"the adapter of model\.embed_tokens \(Embedding\) is not one plain LoRA adapter"),
        (["lm_head"], "lm_head shares its weight with another layer"),
    ):
        model = load_causal_lm(policy, dtype=torch.float32)
        with pytest.raises(ConfigError, match=message):
            add_adapter(model, LoraConfig(target_modules=targets))


@for_each("excluded", [["down_proj", "q_proj"], r".*\.(down|q)_proj"])
def test_add_adapter_leaves_out_the_excluded_layers(policy: str, excluded: Any) -> None:
    config = LoraConfig(rank=2, exclude_modules=excluded)
    model = add_adapter(load_causal_lm(policy, dtype=torch.float32), config)
    ends = {name.removesuffix(".base_layer.weight").rpartition(".")[2] for name in adapted_layers(model)}
    assert ends == {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    scored = add_adapter(load_scalar_head(policy, dtype=torch.float32), config)
    assert adapted_layers(scored).keys() == adapted_layers(model).keys()
    assert any("score" in name for name, parameter in scored.named_parameters() if parameter.requires_grad)


@for_each(
    ("excluded", "message"),
    [
        (["nowhere"], "exclude_modules=nowhere: Qwen2ForCausalLM has no such layer: use names such as q_proj"),
        ("down_proj", "exclude_modules=down_proj: Qwen2ForCausalLM has no such layer: .* regular expression for whole"),
        ("(", "exclude_modules=\\(: not a regular expression"),
        ("(?i).*Q_PROJ", "not a regular expression .*global flags"),
        (r".*_proj", "No modules were targeted"),
    ],
)
def test_add_adapter_refuses_excluded_layers_that_do_not_fit(policy: str, excluded: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_adapter(load_causal_lm(policy, dtype=torch.float32), LoraConfig(rank=2, exclude_modules=excluded))


def test_add_adapter_takes_the_names_of_heads_and_no_experts_among_excluded_layers(policy: str) -> None:
    for load in (load_causal_lm, load_scalar_head):
        excluded = LoraConfig(rank=2, exclude_modules=["lm_head", "score"])
        assert adapted_layers(add_adapter(load(policy, dtype=torch.float32), excluded))
    experts = LoraConfig(rank=2, experts=True, exclude_modules=["q_proj"])
    with pytest.raises(ConfigError, match="exclude_modules leaves out no experts"):
        add_adapter(load_causal_lm(policy, dtype=torch.float32), experts)


def test_adapted_layers_refuses_dora(policy: str) -> None:
    model = load_causal_lm(policy, dtype=torch.float32)
    dora = peft.get_peft_model(model, peft.LoraConfig(use_dora=True, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"self_attn\.q_proj \(Linear\) is not one plain LoRA adapter"):
        adapted_layers(dora)
    assert adapted_layers(peft.get_peft_model(build_model(), peft.LoraConfig(use_rslora=True)))


@for_each("copied", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_adapted_layers_refuses_different_copies_of_one_weight(copied: list[str]) -> None:
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": copied}
    message = r"model\.embed_tokens\.weight and lm_head\.weight are one weight, .*ensure_weight_tying=True"
    with pytest.raises(ConfigError, match=message):
        adapted_layers(peft.get_peft_model(build_model(), peft.LoraConfig(**settings)))
    tied = peft.get_peft_model(build_model(), peft.LoraConfig(**settings, ensure_weight_tying=True))
    assert adapted_layers(tied)


def test_adapter_under_zero_3_on_two_ranks(policy: str, tmp_path: Path) -> None:
    run_ranks(lora_worker.check_rank, policy, tmp_path)
