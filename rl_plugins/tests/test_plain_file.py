"""Files of tensors and plain values: their content, their digest, and code in them."""

from __future__ import annotations

import datetime
import decimal
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_plugins.errors import CheckpointError, DataError
from rl_plugins.plain_file import load_plain, read_record, save_plain
from rl_plugins.rewards.records import Score
from rl_plugins.rewards.trajectory import RECORDS, Ending
from rl_plugins.rewards.turn_times import TurnTimes, Work
from rl_plugins.tests.equality import same
from rl_plugins.tests.files import Command, limited_file_size
from rl_plugins.tests.loops import for_each

VALUES: dict[str, Any] = {
    "tensors": [torch.arange(3.0), torch.zeros(2, dtype=torch.bfloat16), torch.Size([2])],
    "arrays": [np.arange(3), np.zeros(2, np.float32), np.float64(2), np.array(["a", "bc"]), np.array([1, None, "x"])],
    "plain": [None, True, 1, 2.5, "text", b"bytes", (1, 2), {3, 4}, frozenset([5]), {"a": {"b": []}}],
    "dates": [datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(1), decimal.Decimal("1.5")],
    "random": [random.getstate(), np.random.get_state()],
    "records": [
        Ending(
            Score(1.0, {"length": 2.0}),
            [{"role": "user", "content": "a"}],
            0,
            1,
            times=(TurnTimes(0, 1.0, 2.0, 3.0, (Work("add", 2.0, 0.5),)),),
        ),
        Score(None),
    ],
}


@for_each("name", VALUES)
def test_load_plain_returns_the_saved_values(tmp_path: Path, name: str) -> None:
    record = save_plain(VALUES[name], tmp_path / "file", records=RECORDS)
    assert same(load_plain(tmp_path / "file", records=RECORDS), VALUES[name])
    assert record == read_record(tmp_path / "file")


def test_load_plain_refuses_code(tmp_path: Path) -> None:
    file, mark = tmp_path / "file", tmp_path / "mark"
    torch.save({"a": torch.zeros(2), "b": Command(f"touch {mark}")}, file)
    with pytest.raises(CheckpointError, match=rf"{file} cannot be read as data \(it holds code: .*system\)"):
        load_plain(file)
    torch.save(subprocess.Popen, file)
    with pytest.raises(CheckpointError, match=r"it holds code: \S+Popen"):
        load_plain(file)
    assert not mark.exists()


def test_save_plain_refuses_objects_that_load_plain_would_refuse(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Score.*numbers, texts, arrays"):
        save_plain([Score(1.0)], tmp_path / "file")


@for_each("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"text", b"G\x00"])
def test_load_plain_names_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / 'file'} cannot be read as data \([^\n]+\): use another"):
        load_plain(tmp_path / "file")


def test_load_plain_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / 'file'} is missing"):
        load_plain(tmp_path / "file")


def test_load_plain_names_the_file_in_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^{tmp_path} is a folder: .*its entry `state`$"):
        load_plain(tmp_path)


def test_save_plain_raises_the_error_of_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), limited_file_size(10_000):
        save_plain(torch.zeros(100_000), tmp_path / "file")
    with pytest.raises(OSError, match="No space left on device"):
        save_plain(torch.zeros(100_000), Path("/dev/full"))
