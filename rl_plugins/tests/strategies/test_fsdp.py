"""FSDP2 over gloo: ranks train like a single device, and their checkpoint serves any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_plugins.commands.export import export_checkpoint
from rl_plugins.config.models import LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.strategies.fsdp_shards import read_weights
from rl_plugins.strategies.tensor_parallel import plan_of
from rl_plugins.tests.files import rewrite_manifest
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import fsdp_runs
from rl_plugins.tests.strategies.fsdp_runs import Course, Layout, assert_same_course


class Trained:
    """The courses of the ranks of a layout and of a single device, and the checkpoint of the first step."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        save_tiny_policy(folder / "policy", **sizes_of(layout))
        self.layout, self.folder = layout, folder
        self.start = folder / "checkpoint" / "state"
        self.expected = run(fsdp_runs.course, layout.on_single_device(), folder, {})
        self.course = run(fsdp_runs.course, layout, folder, {"leave": self.start})

    @cached_property
    def bf16_mixed_course(self) -> Course:
        return run(fsdp_runs.bf16_mixed_course, self.layout, self.folder)


def sizes_of(layout: Layout) -> dict[str, Any]:
    return fsdp_runs.EVEN_SIZES if layout is fsdp_runs.GROUPS else fsdp_runs.SIZES


def run(function: Callable[..., Course], layout: Layout, *arguments: Any) -> Course:
    """Return the course of the ranks of a layout; all ranks have the same course."""
    return run_ranks(function, layout, *arguments, world_size=layout.world_size)[0][0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(fsdp_runs.TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(fsdp_runs.GROUPS, tmp_path_factory.mktemp("groups"))


@pytest.fixture(params=["two_ranks", "groups"])
def trained(request: pytest.FixtureRequest) -> Trained:
    """Two ranks without tensor parallelism, or two groups of ranks with tensor parallelism."""
    of_layout: Trained = request.getfixturevalue(request.param)
    return of_layout


@pytest.mark.parametrize("check", ["loading", "sharding", "weight_source", "blend_weights", "load_checkpoint"])
@pytest.mark.parametrize("layout", [fsdp_runs.TWO, fsdp_runs.GROUPS], ids=["two_ranks", "groups"])
def test_fsdp_engines(tmp_path: Path, layout: Layout, check: str) -> None:
    save_tiny_policy(tmp_path / "policy", **sizes_of(layout))
    run_ranks(fsdp_runs.inspect, layout, tmp_path, f"check_{check}", world_size=layout.world_size)


def test_offload_keeps_the_shards_of_a_model_in_host_memory(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    layout = fsdp_runs.TWO.with_options(offload={"policy": "cpu", "reference": "cpu"})
    run_ranks(fsdp_runs.inspect, layout, tmp_path, "check_offload")


def test_ranks_train_like_a_single_device(trained: Trained) -> None:
    assert max(max(norms) for _, _, norms in trained.expected) > 0.05
    assert_same_course(trained.course, trained.expected)


def test_models_on_the_host_train_and_resume_like_a_single_device(two_ranks: Trained) -> None:
    got = run(fsdp_runs.course, fsdp_runs.ON_HOST, two_ranks.folder, {"steps": 1})
    assert_same_course(got, two_ranks.expected[:1])
    got = run(fsdp_runs.course, fsdp_runs.ON_HOST, two_ranks.folder, {"steps": 1, "start": two_ranks.start})
    assert_same_course(got, two_ranks.course[1:])


@pytest.mark.extended
def test_copies_train_and_resume_like_a_single_device(groups: Trained) -> None:
    start = groups.folder / "copies" / "state"
    got = run(fsdp_runs.course, fsdp_runs.COPIES, groups.folder, {"leave": start})
    assert_same_course(got, groups.expected)
    resumed = run(fsdp_runs.course, fsdp_runs.COPIES, groups.folder, {"steps": 1, "start": start})
    assert_same_course(resumed, got[1:], exactly=True)


@pytest.mark.extended
def test_copies_with_accumulated_shards_train_like_a_single_device(groups: Trained) -> None:
    # The copies sum the gradients of several micro-batches once.
    layout = fsdp_runs.COPIES.with_options(accumulate_shards=True)
    options = {"steps": 1, "gradient_checkpointing": True, "packing": False}
    assert_same_course(run(fsdp_runs.course, layout, groups.folder, options), groups.expected[:1])


def test_copies_are_whole_and_send_each_row_once(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    run_ranks(fsdp_runs.inspect, fsdp_runs.COPIES, tmp_path, "check_copies", world_size=4)


def test_load_checkpoint_resumes_bit_for_bit(trained: Trained) -> None:
    options = {"steps": 1, "start": trained.start}
    resumed = run(fsdp_runs.course, trained.layout, trained.folder, options)
    assert_same_course(resumed, trained.course[1:], exactly=True)


def test_one_rank_resumes_a_checkpoint_of_two(two_ranks: Trained) -> None:
    options = {"steps": 1, "start": two_ranks.start}
    resumed = run(fsdp_runs.course, fsdp_runs.ALONE, two_ranks.folder, options)
    assert_same_course(resumed, two_ranks.expected[1:])


@pytest.mark.extended
def test_ranks_without_tensor_parallelism_resume_a_checkpoint_of_groups(groups: Trained) -> None:
    layout = groups.layout.with_options(tensor_parallel=1)
    resumed = run(fsdp_runs.course, layout, groups.folder, {"steps": 1, "start": groups.start})
    assert_same_course(resumed, groups.expected[1:])


def test_export_checkpoint_writes_the_trained_weights(two_ranks: Trained, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    rewrite_manifest(two_ranks.folder / "checkpoint")
    export_checkpoint(two_ranks.folder / "checkpoint", out, model=str(two_ranks.folder / "policy"))
    exported, (weights, _, _) = load_file(out / "model.safetensors"), two_ranks.course[0]
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())


@pytest.mark.extended
def test_accumulate_shards_with_moved_memory_trains_like_a_single_device(two_ranks: Trained) -> None:
    layout = two_ranks.layout.with_options(accumulate_shards=True)
    options = {"steps": 1, "gradient_checkpointing": True}
    got = run(fsdp_runs.course_with_moved_memory, layout, two_ranks.folder, options)
    assert_same_course(got, two_ranks.expected[:1])


@pytest.mark.extended
def test_accumulate_shards_of_padded_rows_in_groups_trains_like_a_single_device(groups: Trained) -> None:
    layout = groups.layout.with_options(accumulate_shards=True)
    options = {"steps": 1, "gradient_checkpointing": True, "packing": False}
    assert_same_course(run(fsdp_runs.course, layout, groups.folder, options), groups.expected[:1])


@pytest.mark.extended
def test_bf16_mixed_keeps_small_steps_in_float32_shards(trained: Trained) -> None:
    assert len(trained.bf16_mixed_course) == 1


@pytest.mark.extended
def test_bf16_mixed_after_a_validation_keeps_frozen_shards_in_bfloat16(two_ranks: Trained) -> None:
    run_ranks(fsdp_runs.check_dtypes_after_validation, fsdp_runs.TWO, two_ranks.folder)


@pytest.mark.extended
def test_bf16_true_gives_the_gradient_norms_of_bf16_mixed(trained: Trained) -> None:
    """Both runs have the gradient of the same weights, one of them from float32 masters."""
    (_, _, norms), (_, _, mixed_norms) = (
        *run(fsdp_runs.bf16_true_course, trained.layout, trained.folder),
        *trained.bf16_mixed_course,
    )
    assert norms == pytest.approx(mixed_norms, rel=0.05)


def test_adapters_train_like_on_a_single_device_and_resume(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    start = tmp_path / "adapters"
    expected = run(fsdp_runs.course_with_adapters, fsdp_runs.TWO.on_single_device(), tmp_path, {})
    got = run(fsdp_runs.course_with_adapters, fsdp_runs.TWO, tmp_path, {"leave": start})
    assert_same_course(got, expected)
    saved = read_weights(start / "policy")
    assert saved and all(".lora_" in name for name in saved)
    resumed = run(fsdp_runs.course_with_adapters, fsdp_runs.TWO, tmp_path, {"start": start, "steps": 1})
    assert_same_course(resumed, got[1:], exactly=True)


def test_bf16_mixed_trains_adapters_in_float32_on_a_bfloat16_model(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    run_ranks(fsdp_runs.check_dtypes_of_adapters, fsdp_runs.TWO, tmp_path)


@pytest.mark.extended
def test_muon_trains_like_on_a_single_device_and_resumes(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    muon, start = {"optimizer": "Muon"}, tmp_path / "checkpoint" / "state"
    one_update = replace(fsdp_runs.TWO, updates=1)
    expected = run(fsdp_runs.course, one_update.on_single_device(), tmp_path, {**muon, "steps": 1})
    got = run(fsdp_runs.course, one_update, tmp_path, {**muon, "leave": start})
    initial = load_file(tmp_path / "policy" / "model.safetensors")
    for name, weight in expected[0][0].items():
        # Muon rounds to bfloat16, and enlarges small differences. A Muon of each shard alone would differ by 0.7.
        tolerance = 0.25 if name.endswith("_proj.weight") else 1e-3
        assert float((got[0][0][name] - weight).norm()) < tolerance * float((weight - initial[name]).norm()), name
    resumed = run(fsdp_runs.course, one_update, tmp_path, {**muon, "steps": 1, "start": start})
    assert_same_course(resumed, got[1:], exactly=True)


def test_sequence_parallel_ranks_train_like_a_single_device(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    got = run(fsdp_runs.course, fsdp_runs.SEQUENCE, tmp_path, {})
    assert_same_course(got, run(fsdp_runs.course, fsdp_runs.SEQUENCE.on_single_device(), tmp_path, {}))


@pytest.mark.extended
def test_sequence_parallel_ranks_train_adapters_on_padded_rows(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    options = {"steps": 1, "packing": False, "gradient_checkpointing": True, "lora": LoraConfig(rank=3)}
    assert len(run(fsdp_runs.course, fsdp_runs.SEQUENCE, tmp_path, options)) == 1


@pytest.mark.extended
def test_tensor_parallel_norms_of_single_heads_learn_from_the_heads_of_all_ranks(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.EVEN_SIZES)
    plain = AutoConfig.from_pretrained(tmp_path / "policy").to_dict()
    other = {"model_type", "architectures", "layer_types", "transformers_version"}
    sizes = {key: value for key, value in plain.items() if key not in other}
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", head_dim=8, **sizes))
    model.save_pretrained(tmp_path / "policy")
    layout, options = fsdp_runs.ONE_GROUP, {"steps": 1}
    got = run(fsdp_runs.course, layout, tmp_path, options)
    assert_same_course(got, run(fsdp_runs.course, layout.on_single_device(), tmp_path, options))


def test_gradients_without_an_optimizer_count_in_no_norm() -> None:
    expected = fsdp_runs.norms_of_last_layer(0, fsdp_runs.TWO.on_single_device())
    norms = run_ranks(fsdp_runs.norms_of_last_layer, fsdp_runs.TWO)[0][0]
    assert min(expected) > 0.1 and norms == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads=3, which 2 ranks cannot share"),
        ({"intermediate_size": 49}, "intermediate_size=49, which 2 ranks cannot share"),
    ],
)
def test_plan_of_refuses_sizes_that_a_group_cannot_share(change: dict[str, int], message: str) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, **change}
    config = AutoConfig.for_model("qwen2", hidden_size=24, num_hidden_layers=1, vocab_size=8, **sizes)
    with pytest.raises(ConfigError, match=message):
        plan_of(AutoModelForCausalLM.from_config(config), "policy", 2)


def test_plan_of_refuses_models_without_a_plan_or_with_dropout() -> None:
    with pytest.raises(ConfigError, match="Linear has no plan for tensor parallelism: set"):
        plan_of(nn.Linear(2, 2), "policy", 2)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", num_hidden_layers=1, **sizes))
    model.base_model.layers[0].mlp.act_fn = nn.Dropout(0.1)
    with pytest.raises(ConfigError, match="the critic has dropout between its blocks"):
        plan_of(model, "critic", 2)
    for drop, is_refused in (("residual_dropout", True), ("attention_dropout", False)):
        other = AutoConfig.for_model("starcoder2", num_hidden_layers=1, intermediate_size=16, **sizes, **{drop: 0.1})
        with pytest.raises(ConfigError, match="between its blocks") if is_refused else nullcontext():
            plan_of(AutoModelForCausalLM.from_config(other), "critic", 2)
