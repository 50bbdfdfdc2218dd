"""Optimizers with 8-bit states: training, checkpoints with the same bits, and refused combinations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_plugins.commands.export import export_checkpoint
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.optimizers import check_optimizer_of_fsdp, check_optimizer_of_zero
from rl_plugins.tests.files import rewrite_manifest
from rl_plugins.tests.loops import case, for_each
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import fsdp_runs, zero_runs
from rl_plugins.tests.strategies.fsdp_runs import Course, Layout, assert_same_course
from rl_plugins.tests.strategies.zero_runs import RUNS, SAVED, STEPS

FSDP: dict[str, Any] = {"optimizer": zero_runs.TORCHAO}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with a policy, of which most matrices have 8-bit states."""
    for name in ("policy", "large"):
        save_tiny_policy(tmp_path / name, hidden_size=128, intermediate_size=256)
    return tmp_path


def weights_after(folder: Path, name: str) -> dict[str, Any]:
    run_ranks(zero_runs.train, folder, name, world_size=RUNS[name].world_size)
    weights: dict[str, Any] = torch.load(folder / f"{name}.pt")["weights"]
    return weights


def parameters(folder: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(folder / "policy" / "model.safetensors").values())


def size_of(*files: Path) -> int:
    return sum(file.stat().st_size for file in files)


def assert_resumed_with_the_same_bits(folder: Path, name: str) -> None:
    whole, resumed = (weights_after(folder, run) for run in (name, f"{name}-resumed"))
    start = load_file(folder / "policy" / "model.safetensors")
    assert max(float((whole["policy"][key] - weight).abs().max()) for key, weight in start.items()) > 0.005
    for model, weights in whole.items():
        assert all(torch.equal(resumed[model][key], weight) for key, weight in weights.items()), model


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_eight_bit_states_train_and_resume_on_a_single_device(folder: Path, library: str) -> None:
    pytest.importorskip(library)
    assert_resumed_with_the_same_bits(folder, f"{library}-single")
    state = RunFolder(folder / f"{library}-single").checkpoint(STEPS) / "state"
    # Weights of three models and, in float32, two moments of two models would have 28 bytes for each parameter.
    assert size_of(state) < 20 * parameters(folder)


def test_export_reads_a_checkpoint_with_states_of_torchao(folder: Path) -> None:
    pytest.importorskip("torchao")
    weights = weights_after(folder, "torchao-single")["policy"]
    checkpoint = RunFolder(folder / "torchao-single").checkpoint(STEPS)
    export_checkpoint(checkpoint, folder / "out", model=str(folder / "policy"))
    exported = load_file(folder / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_states_of_bitsandbytes_train_and_resume_under_zero(folder: Path, stage: int) -> None:
    """Stage 1 with the optimizer on the host, and resumed with memory that moves."""
    pytest.importorskip("bitsandbytes")
    assert_resumed_with_the_same_bits(folder, f"bitsandbytes-{stage}")
    state = RunFolder(folder / f"bitsandbytes-{stage}").checkpoint(SAVED) / "state"
    # Master weights and, in float32, two moments would have 12 bytes for each parameter.
    assert size_of(*(state / "policy").rglob("*_optim_states.pt")) < 8 * parameters(folder)


def test_states_of_bitsandbytes_are_not_cut_for_another_number_of_workers(folder: Path) -> None:
    pytest.importorskip("bitsandbytes")
    weights_after(folder, "bitsandbytes-3")
    with pytest.raises(
        AssertionError,
        match="8-bit states, whose blocks of numbers cannot be cut anew: resume with 2 workers under ZeRO-3",
    ):
        weights_after(folder, "bitsandbytes-3-one")


def course(folder: Path, layout: Layout, **options: Any) -> Course:
    results = run_ranks(fsdp_runs.course, layout, folder, {**FSDP, **options}, world_size=layout.world_size)
    own: Course = results[0][0]
    return own


def test_states_of_torchao_train_and_resume_under_fsdp(folder: Path) -> None:
    pytest.importorskip("torchao")
    start = folder / "checkpoint" / "state"
    whole = course(folder, fsdp_runs.TWO, leave=start)
    assert_same_course(course(folder, fsdp_runs.TWO, steps=1, start=start), whole[1:], exactly=True)
    # Weights and, in float32, two moments would have 12 bytes for each parameter.
    assert size_of(*(start / "policy").iterdir()) < 8 * parameters(folder)
    assert_same_course(course(folder, fsdp_runs.ON_HOST), whole, exactly=True)
    moved = run_ranks(fsdp_runs.course_with_moved_memory, fsdp_runs.TWO, folder, FSDP)[0][0]
    assert_same_course(moved, whole, exactly=True)
    # Blocks of 256 numbers may begin in other places.
    [(policy, _, _)] = course(folder, fsdp_runs.ALONE, steps=1, start=start)
    differences = [float((policy[name] - weight).abs().max()) for name, weight in whole[1][0].items()]
    assert max(differences) < 1e-3
    rewrite_manifest(folder / "checkpoint")
    export_checkpoint(folder / "checkpoint", folder / "out", model=str(folder / "policy"))
    exported = load_file(folder / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in whole[0][0].items())


def optimizer_of(library: str) -> Any:
    return type("AdamW8bit", (), {"__module__": f"{library}.optim.adam"})()


@for_each(
    ("check", "library", "message"),
    [
        (check_optimizer_of_zero, "torchao", "torchao's AdamW8bit has states of full size under ZeRO"),
        (check_optimizer_of_fsdp, "bitsandbytes", "bitsandbytes' AdamW8bit refuses DTensors, the shards of FSDP2"),
    ],
)
def test_strategies_refuse_optimizers_of_the_other_strategy(check: Any, library: str, message: str) -> None:
    with case(library), pytest.raises(ConfigError, match=message):
        check(optimizer_of(library))
    for other in {"torch", "torchao", "bitsandbytes"} - {library}:
        check(optimizer_of(other))
