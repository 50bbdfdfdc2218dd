"""A file on a full disk gives one line, also if the file is only a note. Notes never end a run."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.graceful_stop import GracefulStop
from rl_plugins.callbacks.report import Curves
from rl_plugins.data.prepare.files import write_rows, write_splits
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.errors import StorageError
from rl_plugins.evaluation.generation import SampleFile
from rl_plugins.launch.worker_errors import WorkerFailures
from rl_plugins.report.pictures import draw_curves
from rl_plugins.run_folder import RunFolder, append_metrics
from rl_plugins.signals import stop_on_signals
from rl_plugins.tests.callbacks.training import build_stage, train
from rl_plugins.tests.files import limited_file_size
from rl_plugins.whole_file import append_text, write_whole, write_whole_text


def test_append_text_on_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"notes.txt cannot be written \(File too large\): make room"):
        append_text(tmp_path / "notes.txt", "one\n")
        with limited_file_size(5):
            append_text(tmp_path / "notes.txt", "two\n")
    append_text(tmp_path / "new" / "notes.txt", "one\n")
    assert (tmp_path / "new" / "notes.txt").read_text() == "one\n"


def test_two_writers_of_one_file_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"

    def write_late(temporary: Path) -> None:
        temporary.write_text("first")
        # The other writer is a process of another container with the same number.
        write_whole_text(file, "second")

    write_whole(file, write_late)
    assert file.read_text() == "first" and [path.name for path in tmp_path.iterdir()] == [file.name]


# A folder in the place of a file fails for every user, root as well.


def test_worker_failures_go_on_without_failures_txt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    folder.failures.mkdir()
    WorkerFailures(folder, 1).after_exception(None, {0: ValueError("a bug")})
    said = capsys.readouterr().out
    assert "failures.txt cannot be written" in said and "training worker 0 failed (ValueError: a bug)" in said


def test_resume_goes_on_without_resumes_txt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    train(build_stage(1), [PolicyCheckpoint(tmp_path, every=1)])
    folder.resumes.mkdir()
    stage = build_stage(2)
    train(stage, [PolicyCheckpoint(tmp_path, every=1)], resume=folder.checkpoint(1))
    assert stage.step == 2 and "resumes.txt cannot be written" in capsys.readouterr().out


def test_graceful_stop_without_stopped_txt_is_one_line_after_the_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.stopped.mkdir()
    with pytest.raises(StorageError, match=r"stopped\.txt cannot be written"):
        train(build_stage(3), [PolicyCheckpoint(tmp_path, every=9), GracefulStop(tmp_path, time_limit_s=0.001)])
    assert folder.checkpoints() == [folder.checkpoint(1)]


def test_stop_on_signals_gives_the_signal_to_the_handler_before_if_nothing_can_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, heard = RunFolder(tmp_path / "run"), []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with stop_on_signals(folder):
            folder.stop.mkdir()
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert re.match(r"run: SIGTERM: ending at once: .*stop cannot be written .*\n$", capfd.readouterr().err)


def test_curves_are_left_out_if_the_picture_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    append_metrics(folder.metrics, {"train/reward": 1.0}, 1)
    folder.curves.mkdir()
    with pytest.raises(StorageError, match=r"curves\.png cannot be written"):
        draw_curves({"train/reward": {1: 0.5}}, folder.curves)
    # Nothing is sent to the store.
    Curves(tmp_path).send(None)  # type: ignore[arg-type]
    assert "curves.png cannot be written" in capsys.readouterr().out


def test_write_splits_and_write_rows_on_a_full_disk_leave_no_file(tmp_path: Path) -> None:
    splits = addition_rows(below=100, num_train=64, num_test=8, seed=0)
    with limited_file_size(100), pytest.raises(StorageError, match=r"data cannot be written \(.*\): make room"):
        write_splits(splits, tmp_path / "data")
    rows: Any = [("train", {"text": "x" * 1000})]
    with limited_file_size(100), pytest.raises(StorageError, match=r"data cannot be written \(.*\): make room"):
        write_rows(rows, pa.schema({"text": pa.string()}), tmp_path / "data")
    assert [*(tmp_path / "data").iterdir()] == []


def test_sample_file_in_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    samples = SampleFile(tmp_path / "file" / "samples.parquet", 1, {})
    with pytest.raises(StorageError, match=r"samples.parquet.parts cannot be written"), samples.open():
        raise AssertionError("opened")
