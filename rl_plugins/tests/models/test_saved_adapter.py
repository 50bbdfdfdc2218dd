"""Saved adapters in the format of peft: the function goes on, and another adapter is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.tiny_families import save_tiny_family
from benchmarks.tiny_vision import save_tiny_vision
from rl_plugins.commands.export import _build_adapted_model, _TrainedModel
from rl_plugins.config.models import LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch.algorithm_check import check_adapter
from rl_plugins.models.export import save_adapter
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.lora import MergedWeightSource, add_adapter
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import build_tokenizer, save_tiny_policy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.lora_worker import CONFIG, EXPERTS
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.vision_language import with_frozen_tower
from rl_plugins.weights.source import ModuleWeightSource

TOKENS = torch.arange(3, 19).reshape(2, 8)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("policy"), initializer_range=0.2))


@pytest.fixture(scope="module")
def adapter(policy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(policy, CONFIG, tmp_path_factory.mktemp("adapter"))


def saved(policy: str, config: LoraConfig, folder: Path) -> Path:
    """Save an adapter with random weights; return its folder."""
    model = with_random_adapter(add_adapter(load(policy), config))
    source = MergedWeightSource(ModuleWeightSource(model), model)
    save_adapter(model, source.adapter(), build_tokenizer(), folder / "adapter", is_writer=True)
    return folder / "adapter"


def load(path: str) -> nn.Module:
    return load_causal_lm(path, dtype=torch.float32)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


def test_saved_adapter_goes_on_with_the_function_of_peft(policy: str, adapter: Path) -> None:
    model = add_adapter(load(policy), replace(CONFIG, path=str(adapter)))
    of_peft: Any = peft.PeftModel.from_pretrained(load(policy), adapter)
    assert torch.equal(logits(model), logits(of_peft))
    assert float((logits(model) - logits(load(policy))).abs().max()) > 0.1
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }


def test_adapter_of_peft_with_names_of_layers_fits_the_same_options(policy: str, tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    theirs: Any = peft.get_peft_model(load(policy), settings)
    theirs.save_pretrained(tmp_path)
    config = LoraConfig(rank=2, alpha=4.0, target_modules=["v_proj", "q_proj"], path=str(tmp_path))
    assert torch.equal(logits(add_adapter(load(policy), config)), logits(theirs))


def test_saved_adapter_of_experts(tmp_path: Path) -> None:
    mixture = str(tmp_path / "mixture")
    save_tiny_family("qwen3_moe", tmp_path / "mixture")
    path = saved(mixture, EXPERTS, tmp_path)
    model = add_adapter(load(mixture), replace(EXPERTS, path=str(path)))
    assert torch.equal(logits(model), logits(with_random_adapter(add_adapter(load(mixture), EXPERTS))))
    with pytest.raises(ConfigError, match=r"and the options leave it out: use target_modules=.* experts=true"):
        add_adapter(load(mixture), replace(CONFIG, path=str(path)))


def test_saved_adapter_of_a_run_with_a_frozen_vision_tower_leaves_the_tower_out(tmp_path: Path) -> None:
    save_tiny_vision("llava", tmp_path / "llava")
    folder = str(tmp_path / "llava")
    config = LoraConfig(rank=2)
    trained = with_frozen_tower(with_random_adapter(add_adapter(load(folder), config)), 0.0)
    source = MergedWeightSource(ModuleWeightSource(trained), trained)
    save_adapter(trained, source.adapter(), build_tokenizer(), tmp_path / "adapter", is_writer=True)
    weights = dict(add_adapter(load(folder), replace(config, path=str(tmp_path / "adapter"))).named_parameters())
    of_tower = [name for name in weights if "vision_tower" in name and ".lora_B." in name]
    assert of_tower and not any(weights[name].any() for name in of_tower)
    for name, parameter in trained.named_parameters():
        assert name in of_tower or not parameter.requires_grad or torch.equal(weights[name], parameter)


def test_export_reads_a_checkpoint_of_an_adapter_with_a_frozen_vision_tower(tmp_path: Path) -> None:
    save_tiny_vision("llava", tmp_path / "llava")
    folder, lora = str(tmp_path / "llava"), LoraConfig(rank=2)
    trained = with_frozen_tower(with_random_adapter(add_adapter(load(folder), lora)), 0.0)
    saved_weights = {name: p.detach() for name, p in trained.named_parameters() if p.requires_grad}
    described = _TrainedModel(folder, "32-true", "policy", None, False, lora, exports_adapter=False, vision_lr=0.0)
    model, _ = _build_adapted_model(described, lora, saved_weights, "checkpoint")
    for name, parameter in model.named_parameters():
        assert name not in saved_weights or torch.equal(parameter, saved_weights[name])


def test_scalar_head_stays_new_over_a_saved_adapter_of_a_policy(policy: str, adapter: Path) -> None:
    model = add_adapter(load_scalar_head(policy, dtype=torch.float32), replace(CONFIG, path=str(adapter)))
    assert not logits(model).any()
    weights = load_file(adapter / "adapter_model.safetensors")
    for name, weight in weights.items():
        own = model.get_parameter(name.replace(".weight", ".default.weight"))
        assert torch.equal(own, weight)


def other_settings(**changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return change


def other_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        weights = load_file(folder / "adapter_model.safetensors")
        change(weights)
        save_file(weights, folder / "adapter_model.safetensors")

    return changed


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@for_each(
    ("change", "message"),
    [
        (shutil.rmtree, "no such folder: name a folder with adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "the folder has no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "the folder has no adapter_config.json"),
        (cut, "adapter_model.safetensors is not a whole safetensors file"),
        (other_settings(peft_type="IA3"), "of the kind IA3, not LORA: merge the adapter into its model"),
        (other_settings(use_dora=True), "has use_dora=True, and only plain LoRA adapters are trained here: merge"),
        (other_settings(use_rslora=True), "has use_rslora=True"),
        (other_settings(modules_to_save=["lm_head"]), r"has modules_to_save=\['lm_head'\]"),
        (other_settings(bias="all"), "has bias=all"),
        (other_settings(rank_pattern={"q_proj": 4}), r"has rank_pattern=\{'q_proj': 4\}"),
        (other_settings(init_lora_weights="pissa"), "has init_lora_weights=pissa"),
        (other_settings(setting_of_later="x"), "has setting_of_later=x"),
        (other_settings(r=8), "the adapter has rank=8, and the options rank=3: use rank=8"),
        (other_settings(lora_alpha=16), "the adapter has alpha=16, and the options alpha=6: use alpha=16"),
        (other_weights(lambda weights: weights.pop(NAME)), "q_proj, which the adapter does not change: use target_mod"),
        (
            other_weights(lambda weights: weights[NAME].fill_(torch.nan)),
            "lora_A.weight has weights that are NaN",
        ),
        (
            other_weights(lambda weights: weights.update({NAME.replace("q_proj", "qkv"): weights[NAME].clone()})),
            "self_attn.qkv, which Qwen2ForCausalLM does not have: the adapter is of another model",
        ),
        (
            other_weights(lambda weights: weights.update({NAME: weights[NAME][:, 1:].clone()})),
            r"lora_A.weight has the shape \[3, \d+\], and Qwen2ForCausalLM needs \[3, \d+\]: the adapter is of another",
        ),
        (
            other_weights(lambda weights: weights.update({"base_model.model.lm_head.weight": torch.zeros(2)})),
            "the adapter has whole weights of lm_head.weight: merge the adapter",
        ),
    ],
)
def test_check_adapter_refuses_another_adapter_in_one_line(
    policy: str, adapter: Path, tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    path = shutil.copytree(adapter, tmp_path / "changed")
    change(path)
    with pytest.raises(ConfigError, match=message) as error:
        check_adapter("model.lora", policy, replace(CONFIG, path=str(path)), trust_remote_code=False)
    text = str(error.value)
    assert "\n" not in text and text.startswith(f"model.lora.path={path}: ")
    shutil.rmtree(path, ignore_errors=True)


def test_check_adapter_refuses_other_layers_and_accepts_the_adapter(policy: str, adapter: Path) -> None:
    check_adapter("model.lora", policy, replace(CONFIG, path=str(adapter)), trust_remote_code=False)
    other = replace(CONFIG, path=str(adapter), target_modules=["q_proj"])
    layers = r"target_modules=\[down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj\]"
    with pytest.raises(ConfigError, match=rf"layers\.0\.mlp\.down_proj, and the options leave it out: use {layers}"):
        check_adapter("model.lora", policy, other, trust_remote_code=False)
