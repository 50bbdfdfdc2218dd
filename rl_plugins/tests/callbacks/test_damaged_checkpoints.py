"""Checkpoints that cannot be written, and checkpoints with damaged files, of one device and of sharded strategies."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.callbacks.best_checkpoints import BestCheckpoints
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.commands.export import export_checkpoint
from rl_plugins.config.models import CriticConfig, OptimizerConfig
from rl_plugins.errors import CheckpointError, DataError, StorageError
from rl_plugins.manifest import find_damage, read_manifest
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.callbacks.training import AfterStep, build_stage, sharded, train
from rl_plugins.tests.files import Command, flip_byte, limited_file_size, rewrite_manifest
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Run with checkpoints of two steps."""
    train(build_stage(2), [PolicyCheckpoint(tmp_path / "run", every=1)])
    return RunFolder(tmp_path / "run")


def resume(folder: RunFolder, step: int) -> None:
    train(build_stage(4), [PolicyCheckpoint(folder.path, every=1)], resume=folder.checkpoint(step))


def test_load_checkpoint_names_a_damaged_file_before_loading(folder: RunFolder) -> None:
    flip_byte(folder.checkpoint(2) / "state")
    expected = f"{folder.checkpoint(2) / 'state'} has another content .*the intact checkpoint before is .*00000001$"
    with pytest.raises(CheckpointError, match=expected):
        resume(folder, 2)


def test_export_checkpoint_names_a_damaged_file(folder: RunFolder, tmp_path: Path) -> None:
    model = str(save_tiny_policy(tmp_path / "model", hidden_size=32, intermediate_size=48))
    flip_byte(folder.checkpoint(2) / "state")
    with pytest.raises(CheckpointError, match=r"state has another content .*: export another checkpoint"):
        export_checkpoint(folder.checkpoint(2), tmp_path / "out", model)
    export_checkpoint(folder.checkpoint(1), tmp_path / "out", model)


def test_export_checkpoint_refuses_weights_that_are_not_finite(folder: RunFolder, tmp_path: Path) -> None:
    model = str(save_tiny_policy(tmp_path / "model", hidden_size=32, intermediate_size=48))
    state = folder.checkpoint(2) / "state"
    content = torch.load(state, weights_only=True)
    name = next(name for name in content["state_dict"] if name.startswith("policy."))
    content["state_dict"][name].view(-1)[-1] = math.nan
    state.unlink()
    torch.save(content, state)
    rewrite_manifest(folder.checkpoint(2))
    message = rf"NaN or infinite: 1 of \d+ parameters, {re.escape(name.removeprefix('policy.'))} first: export another"
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(folder.checkpoint(2), tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


def test_export_checkpoint_on_a_full_disk_leaves_nothing(folder: RunFolder, tmp_path: Path) -> None:
    model = str(save_tiny_policy(tmp_path / "model", hidden_size=32, intermediate_size=48))
    with (
        pytest.raises(StorageError, match=r"out cannot be written \(.*File too large.*\): make room"),
        limited_file_size(20_000),
    ):
        export_checkpoint(folder.checkpoint(2), tmp_path / "out", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


@pytest.mark.parametrize("name", ["state", "random_state_0.pt"])
def test_policy_checkpoint_never_runs_code_of_a_checkpoint(folder: RunFolder, tmp_path: Path, name: str) -> None:
    file, mark = folder.checkpoint(2) / name, tmp_path / "mark"
    file.unlink()
    torch.save({"state_dict": {}, "python": Command(f"touch {mark}")}, file)
    rewrite_manifest(folder.checkpoint(2))
    with pytest.raises(CheckpointError, match=rf"{file} cannot be read as data \(it holds code: .*system\)"):
        resume(folder, 2)
    assert not mark.exists()


def test_export_checkpoint_never_runs_code_of_a_checkpoint(folder: RunFolder, tmp_path: Path) -> None:
    model, mark = str(save_tiny_policy(tmp_path / "model")), tmp_path / "mark"
    (folder.checkpoint(2) / "state").unlink()
    torch.save(Command(f"touch {mark}"), folder.checkpoint(2) / "state")
    rewrite_manifest(folder.checkpoint(2))
    with pytest.raises(CheckpointError, match="it holds code"):
        export_checkpoint(folder.checkpoint(2), tmp_path / "out", model)
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_policy_checkpoint_refuses_a_state_with_other_objects(tmp_path: Path) -> None:
    class Odd(PolicyCheckpoint):
        def state_dict(self) -> dict[str, Any]:
            return {"object": Path("x").joinpath, "path": Path("x")}

    with pytest.raises(DataError, match=r"PosixPath.*numbers, texts, arrays"):
        train(build_stage(1), [Odd(tmp_path, every=1)])
    assert RunFolder(tmp_path).checkpoints() == []


def filled_after(step: int, disk: ExitStack) -> AfterStep:
    """Callback after which the disk takes only small files."""
    return AfterStep([step], lambda trainer, stage: disk.enter_context(limited_file_size(20_000)))


def test_policy_checkpoint_on_a_full_disk_leaves_earlier_checkpoints_unchanged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with ExitStack() as disk, pytest.raises(StorageError) as raised:
        train(build_stage(4), [filled_after(3, disk), PolicyCheckpoint(tmp_path, every=1, keep_last=1)])
    assert str(raised.value) == (
        f"checkpoint_00000003 is not saved: {tmp_path / '.checkpoint_00000003.partial' / 'state'} cannot be written "
        "(File too large): make room on its disk, then repeat the command. Earlier checkpoints are unchanged"
    )
    assert folder.checkpoints() == [folder.checkpoint(2)] and folder.unfinished() == []
    train(build_stage(4), [PolicyCheckpoint(tmp_path, every=1)], resume=folder.checkpoint(2))
    assert folder.latest_checkpoint() == folder.checkpoint(4)


@pytest.mark.skipif(not os.path.ismount("/sys"), reason="needs a folder that not even root may write")
def test_policy_checkpoint_in_a_read_only_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot be written \(.*\): make its folder writable"):
        train(build_stage(1), [PolicyCheckpoint(Path("/sys/kernel"), every=1)])


def test_best_checkpoints_have_their_metric_in_the_manifest(tmp_path: Path) -> None:
    keeper = BestCheckpoints(tmp_path, metric="train/reward", keep=9)
    train(build_stage(2), [PolicyCheckpoint(tmp_path, every=1, keep_last=9), keeper])
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        assert find_damage(folder.checkpoint(step)) is find_damage(folder.best(step)) is None
        added = read_manifest(folder.best(step)).keys() - read_manifest(folder.checkpoint(step)).keys()
        assert added == {"metric.json"}


NODES: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 2}


def train_and_fill(rank: int, run: Path, strategy: str) -> str:
    """Train on a rank until the disk of rank 1 is full; return the error."""
    folder = RunFolder(run)
    with ExitStack() as disk:
        # Ranks share the file system, but not the limit of their files.
        fill = [filled_after(2, disk)] if rank == 1 else []
        try:
            train(build_stage(3), [*fill, PolicyCheckpoint(run, every=1)], strategy=sharded(strategy), **NODES)
        except StorageError as error:
            assert folder.checkpoints() == [folder.checkpoint(1)]
            return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3", "fsdp"])
def test_sharded_checkpoint_with_a_full_disk_of_one_rank(tmp_path: Path, strategy: str) -> None:
    outcomes = run_ranks(train_and_fill, tmp_path, strategy)
    errors = {error for error, _ in outcomes}
    assert len(errors) == 1 and "is not saved" in (error := errors.pop()) and "File too large" in error
    checkpoint = RunFolder(tmp_path).checkpoint(1)
    assert find_damage(checkpoint) is None and RunFolder(tmp_path).unfinished() == []
    assert not list(checkpoint.rglob("*.py"))


def resume_sharded(rank: int, run: Path, strategy: str) -> str:
    try:
        train(build_stage(3), [], strategy=sharded(strategy), **NODES, resume=RunFolder(run).checkpoint(1))
    except CheckpointError as error:
        return str(error)
    return ""


FILES_OF_PICKLES: dict[str, list[str]] = {
    "zero-2": ["lightning.ckpt", "policy/zero/*_optim_states.pt", "policy/zero/*_model_states.pt"],
    "fsdp": ["lightning.ckpt", "policy/.metadata"],
}


@pytest.mark.parametrize("strategy", FILES_OF_PICKLES)
def test_sharded_strategies_never_run_code_of_a_checkpoint(
    tmp_path: Path, strategy: str, harmful: Callable[[Path, Path], None]
) -> None:
    run_ranks(train_one_step, tmp_path, strategy)
    mark = tmp_path / "mark"
    for pattern in FILES_OF_PICKLES[strategy]:
        file = next((RunFolder(tmp_path).checkpoint(1) / "state").glob(pattern))
        content = file.read_bytes()
        harmful(file, mark)
        rewrite_manifest(RunFolder(tmp_path).checkpoint(1))
        errors = [error for error, _ in run_ranks(resume_sharded, tmp_path, strategy)]
        assert any("it holds code" in error and str(file) in error for error in errors), errors
        assert not mark.exists()
        file.write_bytes(content)
        rewrite_manifest(RunFolder(tmp_path).checkpoint(1))
    assert [error for error, _ in run_ranks(resume_sharded, tmp_path, strategy)] == ["", ""]


def with_critic(steps: int) -> Any:
    critic = CriticConfig(canned.other_model(), OptimizerConfig(lr=0.01))
    return build_stage(steps, algorithm=Algorithm(advantage="gae"), critic=critic)


def keep_the_newest_critic(rank: int, run: Path, strategy: str) -> None:
    checkpoints = PolicyCheckpoint(run, every=1, keep_models={"critic": 1})
    train(with_critic(2), [checkpoints], strategy=sharded(strategy), **NODES)


def resume_with_critic(rank: int, run: Path, strategy: str, step: int) -> str:
    try:
        train(with_critic(3), [], strategy=sharded(strategy), **NODES, resume=RunFolder(run).checkpoint(step))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["zero-2", "fsdp"])
def test_keep_models_removes_the_critic_of_older_checkpoints(tmp_path: Path, strategy: str) -> None:
    run_ranks(keep_the_newest_critic, tmp_path, strategy)
    older, newest = (RunFolder(tmp_path).checkpoint(step) for step in (1, 2))
    models = [[name for name in ("policy", "critic") if (one / "state" / name).is_dir()] for one in (older, newest)]
    assert models == [["policy"], ["policy", "critic"]]
    assert not [name for name in read_manifest(older) if "critic" in name]
    assert find_damage(older) is None and find_damage(newest) is None
    errors = [error for error, _ in run_ranks(resume_with_critic, tmp_path, strategy, 1)]
    assert all(f"{older / 'state' / 'critic'} holds no shards of model 'critic'" in error for error in errors), errors
    assert [error for error, _ in run_ranks(resume_with_critic, tmp_path, strategy, 2)] == ["", ""]


def train_one_step(rank: int, run: Path, strategy: str) -> None:
    train(build_stage(1), [PolicyCheckpoint(run, every=1)], strategy=sharded(strategy), **NODES)


@pytest.fixture
def harmful() -> Callable[[Path, Path], None]:
    """Function that replaces a file by a pickle that makes another file."""
    import pickle

    def replace(file: Path, mark: Path) -> None:
        if file.name == ".metadata":
            file.write_bytes(pickle.dumps(Command(f"touch {mark}")))
        else:
            torch.save(Command(f"touch {mark}"), file)

    return replace
