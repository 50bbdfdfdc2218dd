"""Files kept in host memory and written by a thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_plugins.background_writer import BackgroundWriter
from rl_plugins.errors import DataError
from rl_plugins.manifest import CheckpointWriter
from rl_plugins.plain_file import load_plain, read_record
from rl_plugins.tests.files import limited_file_size


def states() -> dict[str, Any]:
    """Tensors that share storages, in an order that is not alphabetical."""
    large = torch.arange(100_000, dtype=torch.float32)
    tied = torch.nn.Parameter(torch.ones(3, 4))
    return {"z": large[10:20], "a": large.view(100, 1000).T, "tied": [tied, tied], "step": 3, "text": "z"}


def fill(writer: CheckpointWriter, values: dict[str, Any]) -> None:
    writer.make_folder(writer.folder / "inner")
    writer.save(values, writer.folder / "inner" / "states.pt")
    writer.save_text("a note", writer.folder / "note.txt")
    with writer.create(writer.folder / "file.tmp") as file:
        torch.save(values["z"], file)
        torch.save(values["a"], file)
    writer.rename(writer.folder / "file.tmp", writer.folder / "file")
    (writer.folder / "other").write_text("of another library")
    writer.add(writer.folder / "other")


def test_background_writer_writes_the_bytes_of_the_moment_of_save(tmp_path: Path) -> None:
    at_once, background = CheckpointWriter(tmp_path / "at_once"), BackgroundWriter(tmp_path / "background")
    values = states()
    fill(at_once, values)
    fill(background, values)
    values["z"].zero_()
    values["tied"][0].data.zero_()
    values["step"] = 4
    background.start()
    assert background.wait(60) is None and background.is_written()
    assert background.failure is None and background.files == at_once.files
    assert set(background.files) == {"inner/states.pt", "note.txt", "file", "other"}
    for name, record in background.files.items():
        assert read_record(background.folder / name) == record
    loaded = load_plain(background.folder / "inner" / "states.pt")
    assert loaded["z"].tolist() == list(range(10, 20)) and loaded["step"] == 3
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()


def test_background_writer_refuses_code_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"states\.pt would hold objects that are code"):
        BackgroundWriter(tmp_path).save({"path": Path("x")}, tmp_path / "states.pt")


def test_background_writer_keeps_the_first_error_of_the_thread(tmp_path: Path) -> None:
    writer = BackgroundWriter(tmp_path)
    fill(writer, states())
    with limited_file_size(10_000):
        writer.start()
        assert writer.wait(60) is None
    assert writer.failure is not None
    assert writer.failure.startswith(f"{tmp_path / 'inner' / 'states.pt'} cannot be written (File too large)")
    assert writer.files == {} and not (tmp_path / "note.txt").exists()


def test_background_writer_names_the_file_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def copy(*_: object) -> None:
        begun.set()
        go_on.wait()

    monkeypatch.setattr(BackgroundWriter, "_copy", copy)
    writer = BackgroundWriter(tmp_path)
    fill(writer, states())
    writer.start()
    begun.wait()
    assert writer.wait(0.01) == tmp_path / "inner" / "states.pt" and not writer.is_written()
    go_on.set()
    writer.abandon(60)
    assert writer.is_written() and not (tmp_path / "file").exists()
