"""Experts divided over ranks: the ranks train like a single device, and their checkpoint serves any division."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.tiny_families import FAMILIES, text_sizes
from rl_plugins.callbacks.averages import PolicyAverage
from rl_plugins.callbacks.router_losses import RouterLosses
from rl_plugins.commands.export import export_checkpoint
from rl_plugins.config.models import LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import add_adapter
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.router_replay import RouterReplay, routers_of
from rl_plugins.strategies.expert_parallel import check_experts, divide_experts, expert_mesh, experts_of
from rl_plugins.strategies.fsdp import FSDPStrategy, Meshes, clip_gradients, shard
from rl_plugins.strategies.fsdp_shards import send_shards, take_tensors
from rl_plugins.strategies.loss_scale import LossScale
from rl_plugins.strategies.weight_sources import shard_of
from rl_plugins.tests.files import rewrite_manifest
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import float16_runs, fsdp_runs
from rl_plugins.tests.strategies.float16_runs import SCALE
from rl_plugins.tests.strategies.fsdp_runs import Course, Layout, assert_same_course

SIX_EXPERTS = {
    "hidden_size": 32, "moe_intermediate_size": 24, "head_dim": 8, "num_experts": 6, "initializer_range": 0.2,
}  # fmt: skip
# One group of two ranks, and two groups, in which two ranks share three experts of six.
GROUP = Layout(2, {"expert_parallel": 2})
GROUPS = Layout(4, {"expert_parallel": 2}, copies=2, updates=1)


def mixture(family: str, **sizes: Any) -> Any:
    """Return a tiny mixture of experts with random weights."""
    options = {**text_sizes(build_tokenizer()), **FAMILIES[family], **sizes}
    config = AutoConfig.for_model(family, **options, tie_word_embeddings=False, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_mixture(folder: Path) -> Path:
    mixture("qwen3_moe", **SIX_EXPERTS).save_pretrained(folder / "policy")
    build_tokenizer().save_pretrained(folder / "policy")
    return folder


def run(function: Callable[..., Course], layout: Layout, *arguments: Any) -> Course:
    """Return the course of the ranks of a layout; all ranks have the same course."""
    return run_ranks(function, layout, *arguments, world_size=layout.world_size)[0][0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def groups(folder: Path) -> tuple[Course, Course]:
    """The courses of a single device and of two groups, which leave the first step in `folder`."""
    expected = run(fsdp_runs.course, GROUPS.on_single_device(), folder, {})
    return expected, run(fsdp_runs.course, GROUPS, folder, {"leave": folder / "checkpoint" / "state"})


def test_groups_train_like_a_single_device(groups: tuple[Course, Course]) -> None:
    expected, got = groups
    assert max(max(norms) for _, _, norms in expected) > 0.05
    assert_same_course(got, expected)


@pytest.mark.extended
def test_groups_resume_bit_for_bit(folder: Path, groups: tuple[Course, Course]) -> None:
    resumed = run(fsdp_runs.course, GROUPS, folder, {"steps": 1, "start": folder / "checkpoint" / "state"})
    assert_same_course(resumed, groups[1][1:], exactly=True)


@pytest.mark.extended
@pytest.mark.parametrize("size", [1, 2])
def test_two_ranks_resume_a_checkpoint_of_groups(folder: Path, groups: tuple[Course, Course], size: int) -> None:
    layout = replace(GROUPS, world_size=2, strategy={"expert_parallel": size})
    resumed = run(fsdp_runs.course, layout, folder, {"steps": 1, "start": folder / "checkpoint" / "state"})
    assert_same_course(resumed, groups[0][1:])


def test_export_checkpoint_writes_all_experts(folder: Path, groups: tuple[Course, Course], tmp_path: Path) -> None:
    out = tmp_path / "exported"
    rewrite_manifest(folder / "checkpoint")
    export_checkpoint(folder / "checkpoint", out, model=str(folder / "policy"))
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    weights = groups[1][0][0]
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"} <= weights.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())


def test_weight_source_sends_each_row_once(folder: Path) -> None:
    run_ranks(fsdp_runs.inspect, GROUPS, folder, "check_weight_source", world_size=4)


@pytest.mark.extended
def test_reference_with_divided_experts_follows_the_policy(folder: Path) -> None:
    run_ranks(fsdp_runs.inspect, GROUP, folder, "check_blend_weights")


def course_with_router_losses(rank: int, layout: Layout, folder: Path) -> Course:
    """Return the course of a rank with losses of the routers, and with replayed routes."""
    losses = RouterLosses(balance=0.5, z=0.25)
    # The losses begin with the second of two updates.
    return fsdp_runs.trained(layout, rank, folder, steps=1, callbacks=[losses], router_replay="recompute").course


@pytest.mark.extended
def test_router_losses_and_replayed_routes_train_like_a_single_device(folder: Path) -> None:
    expected = run(course_with_router_losses, GROUP.on_single_device(), folder)
    assert_same_course(run(course_with_router_losses, GROUP, folder), expected)


def refuse_average(rank: int, layout: Layout, folder: Path) -> None:
    """Check the message for a moving average of divided experts."""
    with pytest.raises(ConfigError, match="PolicyAverage has not been tried with expert_parallel: leave one of them"):
        fsdp_runs.trained(layout, rank, folder, steps=1, callbacks=[PolicyAverage(keep=0.9)])


def test_policy_average_refuses_divided_experts(folder: Path) -> None:
    run_ranks(refuse_average, GROUP, folder)


@pytest.mark.extended
def test_overflow_of_float16_on_one_rank_leaves_out_the_step_of_all_experts(folder: Path) -> None:
    results = [one for one, _ in run_ranks(float16_runs.run, GROUP, folder, {"overflows_on": 1}, {"steps": 1})]
    # The second of two updates is taken.
    expected = LossScale(SCALE / 2, 1, 1), LossScale(SCALE, 2)
    assert [result.scales for result in results] == [[expected]] * 2
    assert all(bool(weight.isfinite().all()) for weight in results[0].course[0][0].values())


OTHER_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapter": ({}, {"lora": LoraConfig(rank=3), "gradient_checkpointing": True}),
    "sequence_parallel": ({"sequence_parallel": 2}, {}),
    "on_host": (fsdp_runs.ON_HOST.strategy or {}, {"packing": False}),
    "accumulate_shards": ({"accumulate_shards": True}, {"packing": False, "gradient_checkpointing": True}),
}
"""Options of the strategy and of the stage."""


@pytest.mark.extended
@pytest.mark.parametrize("name", OTHER_RUNS)
def test_group_with_other_options_trains_like_a_single_device(folder: Path, name: str) -> None:
    strategy, options = OTHER_RUNS[name]
    layout = GROUP.with_options(**strategy)
    got = run(fsdp_runs.course, layout, folder, {**options, "steps": 1})
    assert_same_course(got, run(fsdp_runs.course, layout.on_single_device(), folder, {**options, "steps": 1}))


def test_group_with_an_adapter_over_four_bits_trains_like_a_single_device(folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    options = {"lora": LoraConfig(rank=3, quantization="nf4"), "steps": 1}
    got = run(fsdp_runs.course, GROUP, folder, options)
    assert_same_course(got, run(fsdp_runs.course, GROUP.on_single_device(), folder, options))


@pytest.mark.extended
def test_bf16_mixed_keeps_small_steps_in_float32_shards_of_experts(folder: Path) -> None:
    assert len(run(fsdp_runs.bf16_mixed_course, GROUP, folder)) == 1


# Single passes --------------------------------------------------------------------------------------------------

TOKENS = ([[5, 6, 7, 8, 9, 10, 11]], [[12, 13, 14]])
"""Token ids of each rank."""


def loss_of(model: Any, rank: int, replay: RouterReplay, chosen: list[int] | None) -> Tensor:
    """Return the loss of a rank's tokens, in a pass with its own routes or with the same experts for all tokens."""
    ids = torch.tensor(TOKENS[rank])
    routers = len(routers_of(model, "router_replay"))
    replay.prepare(None if chosen is None else torch.tensor(chosen).expand(ids.numel(), routers, -1))
    replay.start(torch.arange(ids.numel()), ids.numel())
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.log_softmax(dim=-1).square().mean()


def compare_passes(rank: int, family: str, chosen: list[int] | None) -> None:
    """Compare gradients of two ranks with divided experts, and their norm, with those of the mean of both losses."""
    plain, model = mixture(family), mixture(family)
    replays = RouterReplay(), RouterReplay()
    for replay, one in zip(replays, (plain, model), strict=True):
        replay.install(one)
    expected = [loss_of(plain, other, replays[0], chosen) for other in range(2)]
    (sum(expected, torch.zeros(())) / 2).backward()
    whole = take_tensors(model)
    mesh, flat = expert_mesh("cpu", 2, 2), init_device_mesh("cpu", (2,))
    experts = divide_experts(model, "policy", mesh)
    shard(model, Meshes(flat, flat, mesh), MixedPrecisionPolicy(), experts=experts)
    assert experts and all(module.num_experts == 2 for module in experts)
    send_shards(model, whole if rank == 0 else {}, torch.device("cpu"))
    assert all(len(shard_of(p)) == 2 for module in experts for p in module.parameters())
    loss = loss_of(model, rank, replays[1], chosen)
    torch.testing.assert_close(loss, expected[rank])
    loss.backward()
    squares = []
    for (name, parameter), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient, expected_gradient = parameter.grad, wanted.grad
        if expected_gradient is None:
            # A pass without FSDP2 gives experts no gradient, if no token chooses an expert of the layer.
            expected_gradient = torch.zeros_like(wanted)
        assert isinstance(gradient, DTensor), name
        whole_gradient, tolerance = gradient.full_tensor(), 1e-5 * float(expected_gradient.abs().max()) + 1e-8
        assert float((whole_gradient - expected_gradient).abs().max()) <= tolerance, name
        squares.append(expected_gradient.square().sum())
    norm = clip_gradients(list(model.parameters()), 0.1)
    assert norm == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-4)
    assert clip_gradients(list(model.parameters()), 0.1) == pytest.approx(min(norm, 0.1), rel=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss"])
def test_divide_experts_gives_the_gradients_of_whole_experts(family: str) -> None:
    run_ranks(compare_passes, family, None)


def test_divide_experts_of_ranks_whose_experts_get_no_token() -> None:
    for chosen in ([0, 1], [3, 2]):
        run_ranks(compare_passes, "gpt_oss", chosen)


# Refusals -------------------------------------------------------------------------------------------------------


def test_experts_of_refuses_experts_that_ranks_cannot_share() -> None:
    with pytest.raises(ConfigError, match="expert_parallel=3: 3 ranks cannot share the 4 experts of the critic: set"):
        experts_of(mixture("mixtral"), "critic", 3)
    with pytest.raises(ConfigError, match="GraniteMoeHybridForCausalLM has no plan for expert parallelism: set"):
        experts_of(mixture("granitemoehybrid"), "policy", 2)
    adapted = add_adapter(mixture("mixtral"), LoraConfig(rank=2, experts=True))
    with pytest.raises(ConfigError, match=r"the experts of the policy have an adapter, .* leave experts out"):
        experts_of(adapted, "policy", 2)


def test_check_experts_refuses_models_without_experts() -> None:
    dense = nn.Linear(2, 2)
    check_experts({"policy": mixture("mixtral"), "critic": dense}, 2)
    with pytest.raises(ConfigError, match="expert_parallel=2: no model has experts: set expert_parallel=1"):
        check_experts({"policy": dense}, 2)


def test_fsdp_strategy_refuses_experts_with_other_divisions_of_blocks() -> None:
    others: list[dict[str, Any]] = [{"tensor_parallel": 2}, {"workers_per_copy": 2}]
    for options in others:
        with pytest.raises(ConfigError, match="expert_parallel cannot be combined with tensor_parallel and workers"):
            FSDPStrategy(expert_parallel=2, **options)
