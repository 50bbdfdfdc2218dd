"""FSDP2 over gloo: what two ranks train is what one device trains, and their checkpoint serves any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_plugins.errors import ConfigError
from rl_plugins.launch.export import export_checkpoint
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.strategies.fsdp import blocks
from rl_plugins.strategies.host_memory import HostMemory
from rl_plugins.strategies.tensor_parallel import plan_of
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import fsdp_worker


def test_two_ranks_train_as_one_device_does(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_worker.SIZES)
    (((first, *_), expected), _), _ = run_ranks(fsdp_worker.train, tmp_path)
    run_ranks(fsdp_worker.go_on_alone, tmp_path, expected, world_size=1)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported", model=str(tmp_path / "policy"))
    exported, trained = load_file(tmp_path / "exported" / "model.safetensors"), first[0]
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in trained.items())


def test_adapters_of_two_ranks_train_as_those_of_one_device(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_worker.SIZES)
    run_ranks(fsdp_worker.train_adapters, tmp_path)


def test_ranks_that_share_blocks_train_as_one_device_does(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_worker.SIZES | {"intermediate_size": 50})
    run_ranks(fsdp_worker.train_in_groups, tmp_path, 4, world_size=4)


def test_ranks_that_share_tokens_train_as_one_device_does(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_worker.SIZES)
    run_ranks(fsdp_worker.train_in_sequence, tmp_path)


def test_norms_of_single_heads_learn_from_the_heads_of_all_ranks(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_worker.SIZES | {"intermediate_size": 50})
    plain = AutoConfig.from_pretrained(tmp_path / "policy").to_dict()
    other = {"model_type", "architectures", "layer_types", "transformers_version"}
    sizes = {key: value for key, value in plain.items() if key not in other}
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", head_dim=8, **sizes))
    model.save_pretrained(tmp_path / "policy")
    run_ranks(fsdp_worker.train_one_group, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads=3, which 2 ranks cannot share"),
        ({"intermediate_size": 49}, "intermediate_size=49, which 2 ranks cannot share"),
    ],
)
def test_what_a_group_cannot_share_is_refused(change: dict[str, int], message: str) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, **change}
    config = AutoConfig.for_model("qwen2", hidden_size=24, num_hidden_layers=1, vocab_size=8, **sizes)
    with pytest.raises(ConfigError, match=message):
        plan_of(AutoModelForCausalLM.from_config(config), "policy", 2)


def test_models_without_a_plan_or_with_dropout_are_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no plan for tensor parallelism: set"):
        plan_of(nn.Linear(2, 2), "policy", 2)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", num_hidden_layers=1, **sizes))
    model.base_model.layers[0].mlp.act_fn = nn.Dropout(0.1)
    with pytest.raises(ConfigError, match="the critic has dropout between its blocks"):
        plan_of(model, "critic", 2)


def test_blocks_are_those_of_transformers_or_the_members_of_the_outermost_lists() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block()])
    assert blocks(model) == list(model.layers)
    model._no_split_modules = ["Linear"]  # type: ignore[assignment]
    linears = [expert for block in model.layers for expert in block.experts]  # type: ignore[union-attr]
    assert blocks(model) == linears[::-1]


def test_memory_on_the_host_comes_back_in_place() -> None:
    whole = torch.arange(6.0)
    part = whole[2:4]
    memory = HostMemory("cpu")
    assert memory.nbytes([part, whole, part]) == 24
    memory.take([part, whole])
    assert whole.untyped_storage().nbytes() == 0
    memory.give_back()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    part.zero_()
    assert whole.tolist() == [0, 1, 0, 0, 4, 5]
    memory.give_back()
    assert whole.tolist() == [0, 1, 0, 0, 4, 5]
