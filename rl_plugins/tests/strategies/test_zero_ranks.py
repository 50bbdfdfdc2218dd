"""ZeRO over two ranks trains like a single device, and a checkpoint of one worker goes on with two, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_plugins.errors import CheckpointError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.plain_file import load_plain
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.zero_shards import TAG, ZeroShards, deepspeed_records
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import zero_runs
from rl_plugins.tests.strategies.zero_runs import METRICS, RUNS, SAVED, STAGES, STEPS

Results = dict[str, Any]
SOME_STAGES = [pytest.param(1, marks=pytest.mark.extended), 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    save_tiny_policy(folder / "policy", hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=5)
    save_tiny_policy(folder / "wide", hidden_size=256, intermediate_size=1100)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Callable[[str], Results]:
    """Function that returns the results of a run; the first call trains the run."""

    @cache
    def trained(name: str) -> Results:
        run = RUNS[name]
        if run.resume is not None:
            trained(run.resume)
        run_ranks(zero_runs.train, folder, name, world_size=run.world_size)
        loaded: Results = torch.load(folder / f"{name}.pt")
        return loaded

    return trained


def assert_equal(got: Results, expected: Results, first: int = 1, last: int = STEPS) -> None:
    assert list(got["steps"]) == list(range(first, last + 1))
    for step, metrics in got["steps"].items():
        assert metrics == pytest.approx(expected["steps"][step], rel=2e-4, abs=1e-5), step
    assert set(got["weights"]) == {"policy", "critic", "reference"}
    for engine, weights in got["weights"].items():
        for key, weight in weights.items():
            # The gradient of the keys' bias is almost only rounding, because softmax ignores a common part of all keys;
            # Adam's steps are large nevertheless.
            atol = 1e-3 if key.endswith("k_proj.bias") else 1e-4
            torch.testing.assert_close(weight, expected["weights"][engine][key], rtol=1e-3, atol=atol, msg=key)


def test_single_device_run_learns_clips_and_warms_up(results: Callable[[str], Results]) -> None:
    """The comparisons need a run with learning, clipping and a warm-up."""
    steps = results("single")["steps"]
    assert list(steps) == list(range(1, STEPS + 1))
    assert all(values["gradient_norm"] > 0.5 and values["critic/gradient_norm"] > 0.3 for values in steps.values())
    assert len({values["loss"] for values in steps.values()}) == STEPS
    assert len({values["lr"] for values in steps.values()}) == STEPS


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_like_a_single_device(results: Callable[[str], Results], stage: int) -> None:
    assert_equal(results(f"two-{stage}"), results("single"))


@pytest.mark.parametrize("stage", STAGES)
def test_sequence_parallel_ranks_train_like_a_single_device(results: Callable[[str], Results], stage: int) -> None:
    assert_equal(results(f"sequence-{stage}"), results("single"))


@pytest.mark.parametrize("stage", STAGES)
def test_one_worker_resumes_a_checkpoint_of_two_under_another_stage(
    results: Callable[[str], Results], stage: int
) -> None:
    assert_equal(results(f"two-{stage}-one-{stage % 3 + 1}"), results("single"), first=SAVED + 1)


@pytest.mark.parametrize("stage", STAGES)
def test_two_workers_resume_a_checkpoint_of_one(results: Callable[[str], Results], stage: int) -> None:
    assert_equal(results(f"one-{stage}-two-{stage}"), results("single"), first=SAVED + 1)


@pytest.mark.parametrize("stage", STAGES)
def test_resume_with_another_rate_trains_like_a_single_device(results: Callable[[str], Results], stage: int) -> None:
    faster = results(f"one-{stage}-faster")
    assert_equal(faster, results("single-faster"), first=SAVED + 1)
    assert faster["steps"][SAVED + 1]["lr"] == pytest.approx(0.05)


def test_groups_of_parameters_train_and_resume_like_a_single_device(results: Callable[[str], Results]) -> None:
    assert_equal(results("groups-3"), results("single"))
    assert_equal(results("groups-3-one-3"), results("single"), first=SAVED + 1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("run", ["host", "moved"])
def test_offload_to_the_host_does_not_change_training(results: Callable[[str], Results], run: str, stage: int) -> None:
    assert_equal(results(f"{run}-{stage}"), results("single"))


# DeepSpeed may build an op first.
@pytest.mark.parametrize(("run", "whole"), [("files-3", "single"), ("wide-3", "wide-single")])
def test_offload_to_files_does_not_change_training(results: Callable[[str], Results], run: str, whole: str) -> None:
    assert_equal(results(run), results(whole))


def test_files_of_each_model_are_in_a_folder(folder: Path, results: Callable[[str], Results]) -> None:
    results("wide-3")
    files = list((folder / "wide_files").rglob("*.swp"))
    assert {path.relative_to(folder / "wide_files").parts[0] for path in files} == {"policy", "critic", "reference"}


@pytest.mark.parametrize("run", ["files-3-resumed", "wide-3-resumed", "wide-3-reloaded"])
def test_resume_of_states_in_files_trains_to_the_same_bits(results: Callable[[str], Results], run: str) -> None:
    whole, resumed = results(run.rpartition("-")[0]), results(run)
    assert resumed["steps"][STEPS] == whole["steps"][STEPS]
    for model, weights in whole["weights"].items():
        assert all(torch.equal(resumed["weights"][model][name], weight) for name, weight in weights.items()), model


def test_checkpoint_with_states_in_files_needs_a_run_with_files(
    folder: Path, results: Callable[[str], Results]
) -> None:
    results("wide-3")
    shards = RunFolder(folder / "wide-3").checkpoint(SAVED) / "state" / "policy" / TAG
    files = load_plain(next(shards.glob("*_optim_states.pt")), records=deepspeed_records())
    sizes = [master.numel() for master in files["optimizer_state_dict"]["fp32_flat_groups"]]
    assert 0 in sizes and max(sizes) > 0, "some groups of parameters are in files, and some are in memory"
    with pytest.raises(CheckpointError, match=r"resume with 1 workers in the same precision.*policy=nvme"):
        ZeroShards(shards).whole_weights()
    with pytest.raises(AssertionError, match=r"are in files of as many workers .* resume with 1 workers"):
        results("wide-3-one-1")


def test_resumed_run_records_the_restored_engines(folder: Path, results: Callable[[str], Results]) -> None:
    results("two-3-one-1")
    what = "weights, optimizer, schedule, redistributed from 2 workers under ZeRO-3 to 1 under ZeRO-1"
    assert RunFolder(folder / "two-3-one-1").resumes.read_text() == (
        f"two-3-one-1: resumed from checkpoint_00000001: policy ({what}), critic ({what}), "
        "reference (from its own file), random states start again (saved by 2 workers, now 1), data from batch 1\n"
    )
    assert not RunFolder(folder / "two-3").resumes.exists()


def test_bfloat16_weights_have_float32_masters(folder: Path, results: Callable[[str], Results]) -> None:
    runs = {name: results(name) for name in ("bf16-2", "bf16-2-3")}
    start = load_file(folder / "policy" / "model.safetensors")
    moved = {name: masters(folder, name) for name in runs}
    for name, ours in moved.items():
        weights = runs[name]["weights"]["policy"]
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
        for key, weight in weights.items():
            assert torch.equal(ours[key].bfloat16(), weight), (name, key)
        steps = torch.cat([(ours[key] - start[key].bfloat16()).flatten() for key in start])
        # Updates too small for bfloat16 are not lost.
        assert (steps != 0).float().mean() > 0.9 and steps.abs().max() < 1e-4
    # The second run continued the first under another stage, with the moments: without moments, steps would differ.
    difference = torch.cat([(moved["bf16-2"][key] - moved["bf16-2-3"][key]).abs().flatten() for key in start])
    assert difference.mean() < 0.1 * steps.abs().mean()


def masters(folder: Path, name: str) -> dict[str, Tensor]:
    """The float32 weights of the policy in the last checkpoint of a run."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(
        str(RunFolder(folder / name).checkpoint(STEPS) / "state" / "policy"), tag="zero"
    )
    return weights


@pytest.mark.parametrize("stage", SOME_STAGES)
def test_float16_trains_like_float32_and_resumes_with_the_saved_scale(
    results: Callable[[str], Results], stage: int
) -> None:
    got, exact = (results(name)["steps"] for name in (f"float16-{stage}", "single"))
    for step, metrics in got.items():
        assert metrics.items() >= {"loss_scale": 2.0**8, "skipped_updates": 0, "critic/skipped_updates": 0}.items()
        # The weights are rounded once.
        assert [metrics[name] for name in METRICS] == pytest.approx([exact[step][name] for name in METRICS], rel=0.1)
    resumed = results(f"float16-{stage}-resumed")
    # A new engine would begin with the scale 2**16.
    assert resumed["steps"] == {STEPS: got[STEPS]}
    weights = results(f"float16-{stage}")["weights"]["policy"]
    assert all(torch.equal(weight, weights[name]) for name, weight in resumed["weights"]["policy"].items())


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_float16_trains_with_optimizer_states_on_the_host(results: Callable[[str], Results], stage: int) -> None:
    got, expected = (results(f"float16-{place}")["steps"] for place in (f"host-{stage}", stage))
    for step, metrics in got.items():
        assert metrics["skipped_updates"] == 0
        assert [metrics[name] for name in METRICS] == pytest.approx([expected[step][name] for name in METRICS], rel=0.1)


@pytest.mark.extended
def test_float16_resumes_with_the_saved_scale_under_another_stage(results: Callable[[str], Results]) -> None:
    (metrics,) = results("float16-3-one-2")["steps"].values()
    assert (metrics["loss_scale"], metrics["critic/loss_scale"], metrics["skipped_updates"]) == (2.0**8, 2.0**8, 0)


@pytest.mark.parametrize("stage", SOME_STAGES)
def test_overflow_of_float16_leaves_out_the_step_on_all_ranks(
    folder: Path, results: Callable[[str], Results], stage: int
) -> None:
    got = results(f"overflow-{stage}")
    expected = {"loss_scale": 2.0 ** (40 - 2 * STEPS), "skipped_updates": 2 * STEPS}
    assert got["steps"][STEPS].items() >= expected.items()
    assert not any("gradient_norm" in name for metrics in got["steps"].values() for name in metrics)
    start = load_file(folder / "policy" / "model.safetensors")
    weights = got["weights"]["policy"]
    assert all(torch.equal(weights[name], weight.half()) for name, weight in start.items())


@pytest.mark.parametrize("stage", SOME_STAGES)
def test_doubled_scale_of_float16_begins_with_the_next_step(
    folder: Path, results: Callable[[str], Results], stage: int
) -> None:
    got, exact = results(f"doubled-{stage}"), results("sgd-single")
    assert got["steps"][STEPS]["loss_scale"] == 2.0**11 and got["steps"][STEPS]["skipped_updates"] == 0
    for step, metrics in got["steps"].items():
        names = ("gradient_norm", "critic/gradient_norm")
        assert [metrics[name] for name in names] == pytest.approx(
            [exact["steps"][step][name] for name in names], rel=0.1
        )
    start = load_file(folder / "policy" / "model.safetensors")
    step, got_step = (
        torch.cat([(run["weights"]["policy"][name].float() - weight).flatten() for name, weight in start.items()])
        for run in (exact, got)
    )
    # A gradient divided by two times its scale would be half a step.
    assert float((got_step - step).norm()) < 0.1 * float(step.norm())


@pytest.mark.extended
@pytest.mark.parametrize("run", ["bf16-2-float16", "two-3-float16"])
def test_checkpoint_of_another_precision_goes_on_in_float16_with_a_new_scale(
    results: Callable[[str], Results], run: str
) -> None:
    (metrics,) = results(run)["steps"].values()
    assert metrics["loss_scale"] >= 2.0**14


@pytest.mark.extended
def test_checkpoint_of_float16_goes_on_in_bfloat16_without_a_scale(results: Callable[[str], Results]) -> None:
    (metrics,) = results("float16-2-bf16")["steps"].values()
    assert "loss_scale" not in metrics and metrics["gradient_norm"] > 0
