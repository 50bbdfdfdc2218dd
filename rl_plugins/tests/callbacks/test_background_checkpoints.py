"""Checkpoints in the background: equal files, one after the other, in place before a run ends, or not there at all.

In most tests every file is written as late as possible (`late_writing`), so the states of later steps are in memory.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rl_plugins.background_writer import BackgroundWriter
from rl_plugins.callbacks.best_checkpoints import BestCheckpoints
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.divergence_guard import DivergenceGuard
from rl_plugins.callbacks.graceful_stop import GracefulStop
from rl_plugins.config.run import Bounds
from rl_plugins.errors import DeadlineExceeded, StorageError
from rl_plugins.manifest import find_damage, read_manifest
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.callbacks.training import AfterStep, alter, build_stage, sharded, train, weights
from rl_plugins.tests.files import limited_file_size
from rl_plugins.tests.late_writing import late_writing
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.tests.ranks import run_ranks

NODES: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "num_nodes": 2}


@pytest.fixture
def _late() -> Iterator[None]:
    with late_writing():
        yield


def in_background(folder: Path, every: int = 1, **options: Any) -> PolicyCheckpoint:
    return PolicyCheckpoint(folder, every=every, background_deadline_s=patient(60), **options)


def filled_after(step: int, disk: ExitStack) -> AfterStep:
    """Callback after which the disk takes only small files."""
    return AfterStep([step], lambda trainer, stage: disk.enter_context(limited_file_size(20_000)))


def save_twice(_: int, folder: Path, strategy: str | None) -> None:
    """Train with checkpoints of the same steps at once and in the background."""
    background, newest = RunFolder(folder / "background"), []
    callbacks = [
        PolicyCheckpoint(folder / "at_once", every=2),
        in_background(background.path, every=2),
        AfterStep([2, 3, 4], lambda *_: newest.append(background.latest_checkpoint())),
    ]
    options = {} if strategy is None else {"strategy": sharded(strategy), **NODES}
    with late_writing():
        train(build_stage(5), callbacks, **options)
    # No checkpoint has its name before all files are there.
    assert newest == [None, None, background.checkpoint(2)]


def assert_equal_checkpoints(folder: Path) -> None:
    at_once, background = RunFolder(folder / "at_once"), RunFolder(folder / "background")
    assert [path.name for path in background.checkpoints()] == ["checkpoint_00000004", "checkpoint_00000005"]
    for checkpoint in background.checkpoints():
        manifest = read_manifest(checkpoint)
        assert find_damage(checkpoint) is None and len(manifest) >= 2
        assert manifest == read_manifest(at_once.path / checkpoint.name)
    assert background.unfinished() == []


def test_files_in_the_background_are_equal_on_a_single_device(tmp_path: Path) -> None:
    save_twice(0, tmp_path, None)
    assert_equal_checkpoints(tmp_path)


@pytest.mark.parametrize("strategy", ["zero-2", "zero-3", "fsdp"])
def test_files_in_the_background_are_equal_on_two_ranks(tmp_path: Path, strategy: str) -> None:
    run_ranks(save_twice, tmp_path, strategy)
    assert_equal_checkpoints(tmp_path)


@pytest.mark.usefixtures("_late")
def test_run_continues_from_a_checkpoint_in_the_background_with_the_same_bits(tmp_path: Path) -> None:
    whole = build_stage(4)
    train(whole, [])
    train(build_stage(2), [in_background(tmp_path)])
    resumed = build_stage(4)
    train(resumed, [in_background(tmp_path)], resume=RunFolder(tmp_path).checkpoint(2))
    assert all(one.equal(other) for one, other in zip(weights(whole), weights(resumed), strict=True))


def test_loggers_get_the_seconds_of_each_wait(tmp_path: Path) -> None:
    _, log = train(build_stage(3), [in_background(tmp_path, every=2)])
    waits = [(step, row["checkpoint/wait_s"]) for step, row in log.rows if "checkpoint/wait_s" in row]
    assert {step for step, _ in waits} == {2, 3} and all(seconds > 0 for _, seconds in waits)
    _, log = train(build_stage(3), [PolicyCheckpoint(tmp_path / "at_once", every=2)])
    assert not any("checkpoint/wait_s" in row for _, row in log.rows)


@pytest.mark.parametrize("step", [3, 4])
def test_full_disk_ends_the_next_save_or_the_training(tmp_path: Path, step: int) -> None:
    """Step 4 is the last step."""
    folder = RunFolder(tmp_path)
    with late_writing(), ExitStack() as disk, pytest.raises(StorageError) as raised:
        train(build_stage(4), [filled_after(step, disk), in_background(tmp_path, keep_last=9)])
    # The checkpoint of the step before was still in memory when the disk was full.
    lost = f"checkpoint_{step - 1:08d}"
    assert str(raised.value) == (
        f"{lost} is not saved: {tmp_path / f'.{lost}.partial' / 'state'} cannot be written (File too large): make room "
        "on its disk, then repeat the command. Earlier checkpoints are unchanged"
    )
    assert folder.checkpoints() == [folder.checkpoint(number) for number in range(1, step - 1)]
    assert all(find_damage(checkpoint) is None for checkpoint in folder.checkpoints()) and folder.unfinished() == []


def train_and_fill(rank: int, run: Path, strategy: str) -> str:
    """Train on a rank until the disk of rank 1 is full; return the error."""
    folder = RunFolder(run)
    with ExitStack() as disk:
        checkpoint = in_background(run)

        def await_first(trainer: object, stage: object) -> None:
            pending = checkpoint.files._pending
            wait_until(lambda: pending is None or pending.writer.is_written(), "checkpoint 1 on the disk of the rank")

        fill = [AfterStep([2], await_first), filled_after(2, disk)] if rank == 1 else []
        try:
            train(build_stage(2), [*fill, checkpoint], strategy=sharded(strategy), **NODES)
        except StorageError as error:
            assert folder.checkpoints() == [folder.checkpoint(1)]
            return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["zero-3", "fsdp"])
def test_full_disk_of_one_rank_ends_the_training_of_all_ranks(tmp_path: Path, strategy: str) -> None:
    errors = {error for error, _ in run_ranks(train_and_fill, tmp_path, strategy)}
    assert len(errors) == 1
    assert re.search(r"checkpoint_00000002 is not saved: .* \(File too large\): make room", errors.pop())
    assert find_damage(RunFolder(tmp_path).checkpoint(1)) is None and RunFolder(tmp_path).unfinished() == []


def test_next_save_waits_until_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, wait = threading.Event(), BackgroundWriter.abandon

    def end_hanging(writer: BackgroundWriter, deadline_s: float) -> None:
        hanging.set()
        wait(writer, deadline_s)

    monkeypatch.setattr(BackgroundWriter, "_write_all", lambda _: hanging.wait())
    monkeypatch.setattr(BackgroundWriter, "abandon", end_hanging)
    message = r"the run waited 0 s for checkpoint_00000001 in the background: rank 0 is writing .*checkpoint_00000001"
    with pytest.raises(DeadlineExceeded, match=message):
        train(build_stage(3), [PolicyCheckpoint(tmp_path, every=1, background_deadline_s=0.01)])
    assert RunFolder(tmp_path).checkpoints() == []


@pytest.mark.usefixtures("_late")
def test_error_of_a_step_gives_up_the_checkpoint_in_the_background(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a bug")

    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="a bug"):
        train(build_stage(4), [in_background(tmp_path, every=2), AfterStep([3], fail)])
    assert folder.checkpoints() == [] and len(folder.unfinished()) == 1
    train(build_stage(2), [in_background(tmp_path)])
    assert folder.checkpoints() == [folder.checkpoint(1), folder.checkpoint(2)] and folder.unfinished() == []


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("every", [2, 9])
def test_request_to_stop_waits_until_the_checkpoint_is_in_place(tmp_path: Path, every: int) -> None:
    folder, newest = RunFolder(tmp_path), []
    ask = AfterStep([2], lambda *_: folder.stop.touch())
    look = AfterStep([2], lambda *_: newest.append(folder.latest_checkpoint()))
    train(build_stage(5), [in_background(tmp_path, every), ask, GracefulStop(tmp_path), look])
    assert newest == [folder.checkpoint(2)] and folder.stopped.read_text().startswith("after step 2")
    assert find_damage(folder.checkpoint(2)) is None


@pytest.mark.usefixtures("_late")
def test_roll_back_takes_the_checkpoint_in_the_background(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = build_stage(4)
    alter(stage, {3: {"train/loss": float("nan")}})
    guard = DivergenceGuard(Bounds(), action="roll_back", folder=tmp_path)
    train(stage, [guard, in_background(tmp_path, every=2)])
    assert guard.rollbacks == 1 and "rolled back to checkpoint_00000002" in caplog.text


@pytest.mark.usefixtures("_late")
@pytest.mark.parametrize("every", [1, 2])
def test_best_checkpoints_in_the_background(tmp_path: Path, every: int) -> None:
    """With a checkpoint after every second step, some of the best steps have no other checkpoint."""
    rewards = {1: 0.1, 2: 0.4, 3: 0.3, 4: 0.2}
    stage, folder = build_stage(4), RunFolder(tmp_path)
    alter(stage, {step: {"val/reward": reward} for step, reward in rewards.items()})
    best = BestCheckpoints(tmp_path, keep=2)
    consider = AfterStep(list(rewards), lambda trainer, stage: best._consider(trainer, stage))
    train(stage, [in_background(tmp_path, every), best, consider])
    assert folder.bests() == [folder.best(2), folder.best(3)]
    assert all(find_damage(path) is None for path in [*folder.bests(), *folder.checkpoints()])
    assert folder.latest_checkpoint() == folder.checkpoint(4) and folder.unfinished() == []


def test_checkpoints_at_once_keep_no_file_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundWriter, "start", None)
    train(build_stage(1), [PolicyCheckpoint(tmp_path, every=1)])
    assert RunFolder(tmp_path).latest_checkpoint() is not None
