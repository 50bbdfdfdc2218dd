"""Adapters of the experts of a mixture: merged weights, and training over sharded strategies."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.config.models import LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.export import save_adapter
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.lora import MergedWeightSource, adapter_off, add_adapter, plain_weights
from rl_plugins.models.tiny import build_model, build_tokenizer
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models import lora_worker
from rl_plugins.tests.models.lora_worker import EXPERTS
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.tests.models.samples import batch_of, random_samples
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import fsdp_runs
from rl_plugins.weights.source import ModuleWeightSource

LENGTHS = ((3, 5), (4, 2), (1, 6))


def log_probs(model: nn.Module) -> Tensor:
    batch = batch_of(random_samples(*LENGTHS))
    with torch.no_grad():
        found = response_log_probs(model, **batch.forward_inputs)
    return found.log_probs_BT[batch.response_mask.bool()]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_merged_weights_of_experts_give_the_log_probs_of_the_adapter(family: str, tmp_path: Path) -> None:
    save_tiny_family(family, tmp_path)
    plain = load_causal_lm(str(tmp_path), dtype=torch.float32)
    model = add_adapter(load_causal_lm(str(tmp_path), dtype=torch.float32), EXPERTS)
    before = log_probs(plain)
    torch.testing.assert_close(log_probs(model), before, rtol=0, atol=0)
    with_random_adapter(model)
    changed = log_probs(model)
    assert (changed - before).abs().max() > 0.01
    with adapter_off(model):
        assert torch.equal(log_probs(model), before)
    weights = dict(plain_weights(ModuleWeightSource(model), model))
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(log_probs(plain), changed, rtol=0, atol=1e-5)
    for name, weight in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-6)


@for_each("world_size", [1, 2, 3, 7])
def test_shards_of_all_ranks_tile_the_merged_weights_of_experts(world_size: int, tmp_path: Path) -> None:
    save_tiny_family("qwen3_moe", tmp_path)
    model = with_random_adapter(add_adapter(load_causal_lm(str(tmp_path), dtype=torch.float32), EXPERTS))
    whole = dict(plain_weights(ModuleWeightSource(model), model))
    parts: dict[str, list[Tensor]] = {name: [] for name in whole}
    for rank in range(world_size):
        for name, _, part in MergedWeightSource(ModuleWeightSource(model, rank, world_size), model).shards():
            parts[name].append(part)
    for name, weight in whole.items():
        torch.testing.assert_close(torch.cat(parts[name]), weight.flatten(), rtol=1e-6, atol=1e-6)


def test_adapter_of_experts_under_zero_3_trains_like_one_process(tmp_path: Path) -> None:
    save_tiny_family("qwen3_moe", tmp_path)
    run_ranks(lora_worker.check_experts, str(tmp_path))


def test_adapter_of_experts_under_fsdp_trains_like_on_a_single_device(tmp_path: Path) -> None:
    save_tiny_family("qwen3_moe", tmp_path / "policy")
    layouts = (fsdp_runs.TWO.on_single_device(), fsdp_runs.TWO)
    expected, got = (
        run_ranks(fsdp_runs.course_with_expert_adapters, layout, tmp_path, world_size=layout.world_size)[0][0]
        for layout in layouts
    )
    fsdp_runs.assert_same_course(got, expected)


def test_saved_adapter_of_experts_loads_with_peft(tmp_path: Path) -> None:
    save_tiny_family("qwen3_moe", tmp_path / "base")
    model = with_random_adapter(add_adapter(load_causal_lm(str(tmp_path / "base"), dtype=torch.float32), EXPERTS))
    source = MergedWeightSource(ModuleWeightSource(model), model)
    save_adapter(model, source.adapter(), build_tokenizer(), tmp_path / "adapter", is_writer=True)
    base = load_causal_lm(str(tmp_path / "base"), dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(log_probs(loaded), log_probs(model), rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"changes model\.layers\.0\.mlp\.experts\.\w+, and vLLM applies no"):
        source.adapter_files()


def test_add_adapter_refuses_experts_without_the_option(tmp_path: Path) -> None:
    save_tiny_family("mixtral", tmp_path)
    model = load_causal_lm(str(tmp_path), dtype=torch.float32)
    with pytest.raises(ConfigError, match="names layers of experts: use experts=True"):
        add_adapter(model, LoraConfig(rank=2, target_modules=["q_proj", "w1", "w2", "w3"]))


def test_lora_config_refuses_dropout_of_experts() -> None:
    with pytest.raises(ConfigError, match=r"dropout=0\.1: an adapter of experts has no dropout"):
        LoraConfig(rank=2, dropout=0.1, experts=True)


def test_add_adapter_refuses_experts_of_a_dense_model() -> None:
    with pytest.raises(ConfigError, match=r"LoraConfig: experts=True, and Qwen2ForCausalLM has no experts: leave"):
        add_adapter(build_model(), LoraConfig(rank=2, experts=True))
