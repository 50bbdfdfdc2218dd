"""ZeRO over two ranks is the single device's training, and a checkpoint of one worker goes on with two, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.offload import check_file_op
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import zero_ranks
from rl_plugins.tests.strategies.zero_ranks import SAVED, STAGES, STEPS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_policy(folder / "policy", hidden_size=32, intermediate_size=48, initializer_range=0.2, seed=5)
    run_ranks(zero_ranks.alone, folder, world_size=1)
    run_ranks(zero_ranks.pair, folder)
    run_ranks(zero_ranks.alone_again, folder, world_size=1)
    return folder


def results(folder: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"{name}.pt")
    return loaded


def check_equal(folder: Path, name: str, steps: range, other: str = "single") -> None:
    got, expected = results(folder, name), results(folder, other)
    assert list(got["steps"]) == list(steps)
    for step in steps:
        assert got["steps"][step] == pytest.approx(expected["steps"][step], rel=2e-4, abs=1e-5), step
    assert set(got["weights"]) == {"policy", "critic", "reference"}
    for engine, weights in got["weights"].items():
        for key, weight in weights.items():
            # The keys' bias has hardly a gradient but rounding, as softmax does not see what all keys have in common;
            # Adam's steps do not show that.
            atol = 1e-3 if key.endswith("k_proj.bias") else 1e-4
            torch.testing.assert_close(weight, expected["weights"][engine][key], rtol=1e-3, atol=atol, msg=key)


def test_the_single_device_learns_clips_and_warms_up(folder: Path) -> None:
    """Or the comparisons would say nothing."""
    steps = results(folder, "single")["steps"]
    assert list(steps) == list(range(1, STEPS + 1))
    assert all(values["gradient_norm"] > 0.5 and values["critic/gradient_norm"] > 0.3 for values in steps.values())
    assert (
        len({values["loss"] for values in steps.values()}) == len({values["lr"] for values in steps.values()}) == STEPS
    )


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_as_the_single_device(folder: Path, stage: int) -> None:
    check_equal(folder, f"two-{stage}", range(1, STEPS + 1))


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_that_share_tokens_train_as_the_single_device(folder: Path, stage: int) -> None:
    check_equal(folder, f"sequence-{stage}", range(1, STEPS + 1))


@pytest.mark.parametrize("stage", STAGES)
def test_one_worker_goes_on_where_two_stopped_under_another_stage(folder: Path, stage: int) -> None:
    check_equal(folder, f"two-{stage}-one-{stage % 3 + 1}", range(SAVED + 1, STEPS + 1))


@pytest.mark.parametrize("stage", STAGES)
def test_two_workers_go_on_where_one_stopped(folder: Path, stage: int) -> None:
    check_equal(folder, f"one-{stage}-two-{stage}", range(SAVED + 1, STEPS + 1))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("run", ["host", "moved"])
def test_states_on_the_host_change_nothing(folder: Path, run: str, stage: int) -> None:
    check_equal(folder, f"{run}-{stage}", range(1, STEPS + 1))


# DeepSpeed builds its op first.
@pytest.mark.timeout(1200)
def test_states_in_files_change_nothing(folder: Path) -> None:
    try:
        check_file_op()
    except ConfigError as error:
        pytest.skip(str(error))
    run_ranks(zero_ranks.files, folder, world_size=1, timeout_s=1000)
    check_equal(folder, "files-3", range(1, STEPS + 1))
    check_equal(folder, "wide-3", range(1, 2), "wide-single")
    files = list((folder / "wide_files").rglob("*.swp"))
    assert {path.relative_to(folder / "wide_files").parts[0] for path in files} == {"policy", "critic", "reference"}


def test_a_resumed_run_says_what_it_was_given_back(folder: Path) -> None:
    what = "weights, optimizer, schedule, dealt anew from 2 workers under ZeRO-3 to 1 under ZeRO-1"
    assert RunFolder(folder / "two-3-one-1").resumes.read_text() == (
        f"two-3-one-1: resumed from checkpoint_00000002: policy ({what}), critic ({what}), "
        "reference (from its own file), random states begin anew (saved by 2 workers, now 1), data from batch 2\n"
    )
    assert not RunFolder(folder / "two-3").resumes.exists()


def test_bfloat16_weights_have_float32_masters(folder: Path) -> None:
    start = load_file(folder / "policy" / "model.safetensors")
    moved = {name: masters(folder, name) for name in ("bf16-2", "bf16-2-3")}
    for name, ours in moved.items():
        weights = results(folder, name)["weights"]["policy"]
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
        for key, weight in weights.items():
            assert torch.equal(ours[key].bfloat16(), weight), (name, key)
        steps = torch.cat([(ours[key] - start[key].bfloat16()).flatten() for key in start])
        # Updates that bfloat16 would have lost are there.
        assert (steps != 0).float().mean() > 0.9 and steps.abs().max() < 1e-4
    # The second went on from the first under another stage, with its moments: without them it would step elsewhere.
    difference = torch.cat([(moved["bf16-2"][key] - moved["bf16-2-3"][key]).abs().flatten() for key in start])
    assert difference.mean() < 0.1 * steps.abs().mean()


def masters(folder: Path, name: str) -> dict[str, Tensor]:
    """The float32 weights of the policy in the last checkpoint of a run."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(
        str(RunFolder(folder / name).checkpoint(STEPS) / "state" / "policy")
    )
    return weights
