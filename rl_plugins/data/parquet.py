"""Rows of prompts: read from parquet files (or taken from any sequence of mappings) and checked, every one.

The columns are those of verl: `prompt`, a list of {role, content}; `data_source` and `ability`, strings;
`reward_model`, a mapping with `ground_truth`; `extra_info`, a mapping. More columns are welcome and ride
along. Needs pyarrow alone, so that a launcher can check the files in a moment, before anything heavy is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.errors import ConfigError

COLUMNS = ("prompt", "data_source", "ability", "reward_model", "extra_info")
UNSCORED_COLUMNS = tuple(name for name in COLUMNS if name != "reward_model")
"""Of rows whose responses are given, and so need no reward."""

Row = Mapping[str, Any]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class RowSource(Protocol):
    """A data set: anything with a length that gives a row for each number below it."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int, /) -> Row:
        """Return a row."""


@dataclass(frozen=True)
class PromptRows:
    """Checked rows, in the order of their files; a row's number in this order is the identity of its prompt.

    Attributes:
        rows: the rows.
        origins: name of each file (or of the data set's class) and the number of its first row.
    """

    rows: Sequence[Row]
    origins: Sequence[tuple[str, int]]

    def where(self, number: int) -> str:
        """Name a row for a message: its file and its place there, counted from 0."""
        name, first = max((origin for origin in self.origins if origin[1] <= number), key=lambda item: item[1])
        return f"{name}, row {number - first}"


def load_rows(source: Paths | RowSource, columns: Sequence[str] = COLUMNS) -> PromptRows:
    """Read one parquet file, several, or a data set, and check every row for the columns.

    Raises:
        ConfigError: a file or a column is missing, or a row is malformed; names the file, the row and the
            column.
    """
    if isinstance(source, str | os.PathLike):
        return _read_files([source], columns)
    if len(source) == 0:
        raise ConfigError("There are no prompts: name at least one parquet file, or a data set with rows.")
    entries: list[Any] = [source[number] for number in range(len(source))]
    if all(isinstance(entry, str | os.PathLike) for entry in entries):
        return _read_files(entries, columns)
    name = type(source).__name__
    rows = [_checked(row, f"{name}, row {number}", columns) for number, row in enumerate(entries)]
    return PromptRows(rows, [(name, 0)])


def check_row(row: Any, where: str, columns: Sequence[str] = COLUMNS) -> None:
    """Raise a ConfigError that names `where` and the column unless the row is well formed."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: expected a mapping with the columns {', '.join(columns)}, got {_kind(row)}.")
    missing = [name for name in columns if name not in row]
    if missing:
        raise ConfigError(f"{where}: column {missing[0]!r} is missing; the row has {', '.join(map(str, row))}.")
    _check_prompt(row["prompt"], where)
    for name in ("data_source", "ability"):
        if not isinstance(row[name], str):
            raise ConfigError(f"{where}, column {name!r}: expected a string, got {_kind(row[name])}.")
    for name in ("reward_model", "extra_info"):
        if name in columns and not isinstance(row[name], Mapping):
            raise ConfigError(f"{where}, column {name!r}: expected a mapping, got {_kind(row[name])}.")
    if "reward_model" in columns and "ground_truth" not in row["reward_model"]:
        raise ConfigError(f"{where}, column 'reward_model': it has no 'ground_truth'.")


def _check_prompt(prompt: Any, where: str) -> None:
    where = f"{where}, column 'prompt'"
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        raise ConfigError(f"{where}: expected a list of {{role, content}} messages, got {_kind(prompt)}.")
    for position, message in enumerate(prompt):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise ConfigError(f"{where}: message {position} has no string {key!r}.")
    if not any(message["content"].strip() for message in prompt):
        raise ConfigError(f"{where}: the prompt is empty; remove the row or give it a message with text.")


def _read_files(paths: Sequence[str | os.PathLike[str]], columns: Sequence[str]) -> PromptRows:
    rows: list[Row] = []
    origins = []
    for path in map(Path, paths):
        origins.append((str(path), len(rows)))
        rows += _read_file(path, columns)
    return PromptRows(rows, origins)


def _read_file(path: Path, columns: Sequence[str]) -> list[Row]:
    if not path.is_file():
        found = "it is a folder: name the parquet files in it" if path.is_dir() else "there is no such file"
        raise ConfigError(
            f"{path}: {found}. `python -m rl_plugins.data.prepare --help` lists the data sets it can make."
        )
    try:
        # Not `read_table`, which imports pandas and takes half a second.
        table = pq.ParquetFile(path).read()
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]}).") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ConfigError(f"{path}: column {missing[0]!r} is missing; the file has {', '.join(table.column_names)}.")
    if table.num_rows == 0:
        raise ConfigError(f"{path}: the file has no rows.")
    return [_checked(row, f"{path}, row {number}", columns) for number, row in enumerate(table.to_pylist())]


def _checked(row: Any, where: str, columns: Sequence[str]) -> Row:
    check_row(row, where, columns)
    return row


def _kind(value: Any) -> str:
    return "nothing (null)" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
