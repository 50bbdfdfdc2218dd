"""Training in float16: close to float32, and an overflow on one rank leaves out the step on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.strategies.loss_scale import LossScale
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import float16_runs, fsdp_runs
from rl_plugins.tests.strategies.float16_runs import SCALE, Result
from rl_plugins.tests.strategies.fsdp_runs import ADAPTERS, Layout, Weights, assert_same_course

ONE_UPDATE = replace(fsdp_runs.TWO, updates=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float16")
    save_tiny_policy(folder / "policy", **fsdp_runs.SIZES)
    return folder


def run(folder: Path, layout: Layout = ONE_UPDATE, values: dict[str, Any] | None = None, **options: Any) -> Result:
    """Return the result of the ranks, which is equal on all ranks."""
    results = [result for result, _ in run_ranks(float16_runs.run, layout, folder, values or {}, options)]
    first: Result = results[0]
    assert all(result.scales == first.scales for result in results)
    return first


@pytest.mark.extended
def test_tensor_parallel_ranks_in_float16_train_and_leave_out_a_step(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.EVEN_SIZES)
    layout = replace(fsdp_runs.ONE_GROUP, updates=1)
    assert [scales[0].skipped for scales in run(tmp_path, layout, {"overflows_on": 1}).scales] == [1, 1]


def start_of(folder: Path) -> Weights:
    # The shards were loaded in float16.
    return {name: weight.half().float() for name, weight in load_file(folder / "policy" / "model.safetensors").items()}


def distance(weights: Weights, others: Weights) -> float:
    return sum(float((weights[name] - other).square().sum()) for name, other in others.items()) ** 0.5


def test_ranks_in_float16_train_like_a_single_device_in_float32(folder: Path) -> None:
    alone = ONE_UPDATE.on_single_device()
    exact: Any = run_ranks(fsdp_runs.course, alone, folder, {}, world_size=1)[0][0]
    got = run(folder)
    assert got.scales[-1] == (LossScale(SCALE, 2), LossScale(SCALE, 2))
    norms, exact_norms = got.course[-1][2], exact[-1][2]
    assert norms == pytest.approx(exact_norms, rel=0.02) and norms != exact_norms
    policy, trained_exactly = got.course[-1][0], exact[-1][0]
    assert distance(policy, trained_exactly) < 0.05 * distance(trained_exactly, start_of(folder))
    assert got.metrics["train/loss_scale"] == SCALE and got.metrics["train/critic/skipped_updates"] == 0


def test_overflow_on_one_rank_leaves_out_the_step_on_all_ranks(folder: Path) -> None:
    got = run(folder, values={"overflows_on": 1})
    assert [scales[0] for scales in got.scales] == [LossScale(SCALE / 2, 0, 1), LossScale(SCALE / 2, 1, 1)]
    assert [scales[1] for scales in got.scales] == [LossScale(SCALE, 1), LossScale(SCALE, 2)]
    (first, _, norms), (second, _, later_norms) = got.course
    start = start_of(folder)
    assert all(torch.equal(weight, start[name]) for name, weight in first.items())
    assert distance(second, start) > 0.1
    assert norms[0] is None and norms[1] > 0 and later_norms[0] > 0
    assert got.metrics["train/skipped_updates"] == 1 and got.metrics["train/loss_scale"] == SCALE / 2


def test_too_large_scale_is_halved_until_the_gradients_are_finite(folder: Path) -> None:
    got = run(folder, values={"first_scale": 2.0**22}, steps=12)
    skipped = got.scales[-1][0].skipped
    assert 0 < skipped < 12 and got.scales[-1][0] == LossScale(2.0 ** (22 - skipped), 12 - skipped, skipped)
    assert all(bool(weight.isfinite().all()) for weight in got.course[-1][0].values())
    assert distance(got.course[-1][0], start_of(folder)) > 0.1


def test_resume_in_float16_continues_with_the_same_bits_and_the_same_scale(folder: Path) -> None:
    start = folder / "checkpoint" / "state"
    whole = run(folder, fsdp_runs.TWO, {"overflows_on": 0}, leave=start)
    # A resumed run without the saved scale would begin with another one.
    resumed = run(folder, fsdp_runs.TWO, {"first_scale": 2.0**4}, start=start, steps=1)
    assert whole.scales[0] == (LossScale(SCALE / 2, 1, 1), LossScale(SCALE, 2))
    assert resumed.scales == whole.scales[1:]
    assert_same_course(resumed.course, whole.course[1:], exactly=True)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({}, {**ADAPTERS, "steps": 1}),
        ({"offload": dict.fromkeys(("policy", "critic", "reference"), "cpu")}, {"steps": 1}),
        pytest.param({}, {"optimizer": "Muon"}, marks=pytest.mark.extended),
        ({"sequence_parallel": 2}, {"steps": 1}),
        pytest.param({}, {"steps": 1, "packing": False, "gradient_checkpointing": True}, marks=pytest.mark.extended),
    ],
    ids=["adapters", "on_host", "muon", "sequence_parallel", "padded"],
)
def test_float16_trains_with_other_options(folder: Path, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    got = run(folder, ONE_UPDATE.with_options(**strategy), **options)
    assert got.scales[-1][0].skipped == got.scales[-1][1].skipped == 0
    assert all(bool(weight.isfinite().all()) for weight in got.course[-1][0].values())
    assert 0 < got.metrics["train/gradient_norm"] < float("inf")
