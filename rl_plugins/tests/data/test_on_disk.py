from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_plugins.data.on_disk import MappedLists
from rl_plugins.data.parquet import load_rows
from rl_plugins.errors import ConfigError, StorageError
from rl_plugins.tests.loops import for_each


def test_load_rows_returns_the_rows_of_all_files_in_any_access_order(row, tmp_path):
    rows = [row(number, level=number % 3, mixed=None if number % 2 else [number]) for number in range(2500)]
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.Table.from_pylist(rows[:1700]), first, row_group_size=700)
    pq.write_table(pa.Table.from_pylist([{**entry, "other": 1} for entry in rows[1700:]]), second)
    loaded = load_rows([first, second])
    assert list(loaded)[:1700] == rows[:1700]
    assert loaded.rows[2499] == {**rows[2499], "other": 1}
    assert [loaded.rows[number] for number in (1699, 0, 1024, 699, 700)] == [rows[n] for n in (1699, 0, 1024, 699, 700)]
    assert set(loaded.columns) == {*rows[0], "other"}
    assert loaded.location(1701) == f"{second}, row 1"


def test_rows_on_disk_use_unnamed_files_that_are_freed_with_the_rows(row, write_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = write_rows([row(0)])
    loaded, ids = load_rows(path), MappedLists([[1, 2]])
    assert os.listdir(tmp_path / "temporary") == []
    mapped = lambda: Path("/proc/self/maps").read_text().count(str(tmp_path / "temporary"))  # noqa: E731
    assert mapped() == 2
    assert loaded.rows[0] == row(0) and ids[0] == [1, 2]
    del loaded, ids
    assert mapped() == 0


def test_load_rows_reads_dictionary_columns_as_texts(row, tmp_path):
    table = pa.Table.from_pylist([row(number) for number in range(5)])
    place = table.column_names.index("ability")
    table = table.set_column(place, "ability", table["ability"].dictionary_encode())
    pq.write_table(table, tmp_path / "train.parquet")
    assert load_rows(tmp_path / "train.parquet").rows[4] == row(4)


def test_ragged_holds_lists_of_numbers():
    lists = MappedLists([[1, 2, 3], [], [4]])
    assert [*lists] == [[1, 2, 3], [], [4]] and len(lists) == 3
    assert lists.lengths.tolist() == [3, 0, 1]
    assert lists[1:] == [[], [4]]
    assert np.isnan(MappedLists([[0.25, np.nan]], np.float64)[0][1])
    assert [*MappedLists([[], []])] == [[], []]
    with pytest.raises(IndexError):
        lists[3]


@for_each(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk is full"),
        # A quota is full, or a file is too large.
        (errno.EDQUOT, "the disk is full"),
        (errno.EFBIG, "the disk is full"),
        (errno.EACCES, r"no file can be written here \(Permission denied\)"),
    ],
)
def test_load_rows_and_ragged_name_a_full_disk_or_a_folder_without_access(row, write_rows, number, reason):
    path = write_rows([row(0)])

    def refuse(**_):
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", refuse)
        patch.setattr(tempfile, "NamedTemporaryFile", refuse)
        for make in (lambda: load_rows(path), lambda: MappedLists([[1]])):
            with pytest.raises(StorageError, match=f"^{tempfile.gettempdir()}: {reason}.* another folder with TMPDIR"):
                make()


def test_load_rows_and_ragged_name_a_missing_folder_for_temporary_files(row, write_rows, tmp_path, monkeypatch):
    path, absent = write_rows([row(0)]), str(tmp_path / "absent")
    monkeypatch.setenv("TMPDIR", absent)
    # Python has taken the folder before somebody removes it, or finds no folder at all.
    for folder in (absent, None):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [absent])
        for make in (lambda: load_rows(path), lambda: MappedLists([[1]])):
            with pytest.raises(StorageError, match=f"^{absent}: no file can be written here .*folder with TMPDIR$"):
                make()


def test_load_rows_names_a_damaged_file(row, tmp_path):
    path = tmp_path / "cut.parquet"
    pq.write_table(pa.Table.from_pylist([row(number) for number in range(3000)]), path)
    whole = bytearray(path.read_bytes())
    # The footer is whole and the pages are not.
    whole[200:2000] = bytes(1800)
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"cut.parquet: not a readable parquet file"):
        load_rows(path)
