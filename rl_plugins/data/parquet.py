"""Prompt rows: read from parquet files, or taken from any sequence of mappings, and checked one by one.

The columns are those of verl: `prompt`, a list of {role, content}; `data_source` and `ability`, strings;
`reward_model`, a mapping with `ground_truth`; `extra_info`, a mapping. Rows may lack `ability` and `extra_info`. More
columns are allowed and served too.

This module needs pyarrow alone, so the launcher can check the files before anything heavy is imported. Files are read a
few rows at a time and copied to disk (`on_disk`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.data.content_parts import RowsWithTexts, check_parts, with_texts
from rl_plugins.data.on_disk import MappedRows
from rl_plugins.data.sequence_with_slices import SequenceWithSlices
from rl_plugins.errors import ConfigError, RowError

Row = Mapping[str, Any]
COLUMNS = ("prompt", "data_source", "ability", "reward_model", "extra_info")
UNSCORED_COLUMNS = tuple(name for name in COLUMNS if name != "reward_model")
"""Columns of rows with given responses, which need no reward."""
_OPTIONAL = ("ability", "extra_info")
"""Columns that rows may lack."""
OWN_COLUMNS = frozenset({"ending", "image_fault", "image_inputs", "prompt_images", "routed_experts"})
"""Columns that training adds to the columns of prompts."""

# Rows with images are large.
_BATCH_ROWS, _BATCH_BYTES = 1024, 2**26

# A text that is not UTF-8, or a date beyond the years of Python, is a ValueError or an OverflowError.
_DAMAGED = (pa.ArrowException, OSError, ValueError, OverflowError)

FilePath = str | os.PathLike[str]
Paths = FilePath | Sequence[FilePath]
RowForm = Callable[[Row, str], Row]
"""Function of a row and its location: checks the row, and returns the row with a column `prompt`."""


def prompt_row(
    prompt: str | Sequence[Mapping[str, Any]],
    ground_truth: object = "",
    *,
    data_source: str = "default",
    ability: str = "general",
    **extra_info: object,
) -> dict[str, Any]:
    """Return a row with all columns of verl.

    Args:
        prompt: chat messages, or the text of a single message of the user.
        ground_truth: right answer, which the reward function compares with the text of a response.
        data_source: group of the row; rewards may differ by group, and validation has metrics of each group.
        ability: ability that the row trains.
        **extra_info: further values, which the reward function gets as its argument `extra_info`.

    Raises:
        ConfigError: `ground_truth` is a number, which differs from every text.
    """
    if isinstance(ground_truth, int | float):
        raise ConfigError(
            f"ground_truth={ground_truth} is a number, and a reward function compares it with a text, the response: "
            f"pass {str(ground_truth)!r}"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


class RowSource(Protocol):
    """A data set: any object with a length and a row for each number below the length."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int, /) -> Row:
        """Return a row; the same index must always give the same row."""


@dataclass(frozen=True)
class LocatedRow:
    """A row and its place.

    Attributes:
        columns: the row.
        location: file and number of the row, for messages.
        folder: folder at which relative paths in the row start; None for the working directory.
    """

    columns: Row
    location: str
    folder: Path | None = None


@dataclass(frozen=True)
class PromptRows:
    """Checked rows in the order of their files; the number of a row in this order identifies its prompt.

    Attributes:
        rows: the rows; rows of files are on disk and become Python objects on access.
        origins: name of each file (or of the data set's class) and the number of its first row.
        columns: names of all columns; a row may lack some.
        of_files: True for rows of files, False for a data set.
        numbers: numbers of the rows in their files, counted over all files; None for all rows.
    """

    rows: Sequence[Row]
    origins: Sequence[tuple[str, int]]
    columns: Sequence[str]
    of_files: bool
    numbers: np.ndarray | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows, a few in memory at a time."""
        return iter(self.rows)

    def chosen(self, numbers: np.ndarray) -> PromptRows:
        """Return the rows with given numbers, which ascend."""
        return replace(self, rows=_ChosenRows(self.rows, numbers), numbers=numbers)

    def chunks(self, size: int) -> Iterator[list[Row]]:
        """Yield all rows in lists of `size` rows; the last list may be shorter."""
        remaining = iter(self)
        return iter(lambda: list(islice(remaining, size)), [])

    def location(self, number: int) -> str:
        """Return the file of a row and its place in the file, counted from 0, for an error message."""
        return self._place(number)[1]

    def located(self, number: int, row: Row | None = None) -> LocatedRow:
        """Return a row with its place.

        Args:
            number: number of the row.
            row: the row, if the caller has the row already.
        """
        name, location = self._place(number)
        folder = Path(name).parent if self.of_files else None
        return LocatedRow(self.rows[number] if row is None else row, location, folder)

    def _place(self, number: int) -> tuple[str, str]:
        """Return the file (or class) of a row, and its location for an error message."""
        number = number if self.numbers is None else int(self.numbers[number])
        name, first = self.origins[bisect_right(self.origins, number, key=lambda origin: origin[1]) - 1]
        return name, f"{name}, row {number - first}"


class _ChosenRows(SequenceWithSlices[Row]):
    """Rows with given numbers."""

    def __init__(self, rows: Sequence[Row], numbers: np.ndarray) -> None:
        self._rows, self._numbers = rows, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def item(self, number: int) -> Row:
        return self._rows[int(self._numbers[number])]

    def __iter__(self) -> Iterator[Row]:
        # Rows read one after the other take a sixth of the time of single rows.
        if len(self) < len(self._rows) // 6:
            return map(self.item, range(len(self)))
        is_chosen = np.zeros(len(self._rows), dtype=bool)
        is_chosen[self._numbers] = True
        return compress(self._rows, is_chosen)


def load_rows(source: Paths | RowSource, columns: Sequence[str] = COLUMNS, form: RowForm | None = None) -> PromptRows:
    """Open one parquet file, several files, or a data set, and check the columns of every row.

    Args:
        source: path of a file, paths of several files, or a data set.
        columns: names of the columns every row must have.
        form: form of rows with other columns than prompts have; `columns` is empty then.

    Raises:
        ConfigError: a file or a column is missing, a row is malformed, or a data set has no length. The message names
            the file, the row and the column.
        StorageError: the disk with the folder for temporary files is full.
    """
    if isinstance(source, str | os.PathLike):
        return _open_files([source], columns, form)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ConfigError(
            f"the data set (data.dataset of a recipe) is a {type(source).__name__}, without a length or without a row "
            "for each index, which the order of training and a resumed run need: make a list, with list(...), or "
            "turn streaming off"
        )
    if len(source) == 0:
        raise ConfigError("there are no prompts: name at least one parquet file, or a data set with rows")
    if isinstance(source, Sequence) and all(isinstance(entry, str | os.PathLike) for entry in source):
        return _open_files(cast(Sequence[FilePath], source), columns, form)
    rows = cast(RowSource, source)
    name, names = type(rows).__name__, dict.fromkeys(columns)
    for number in range(len(rows)):
        names |= dict.fromkeys(_checked(rows[number], f"{name}, row {number}", columns, form))
    return PromptRows(_served(rows, form), [(name, 0)], list(names), of_files=False)


def check_row(row: object, location: str, columns: Sequence[str] = COLUMNS) -> None:
    """Check the types of a row's columns.

    Args:
        row: the row.
        location: file and row number for the message.
        columns: names of the columns the row must have, but for optional columns.

    Raises:
        RowError: a column is missing or of another type. The message names the location and the column.
    """
    if not isinstance(row, Mapping):
        reason = (
            f"expected a mapping with the columns {', '.join(columns)}, got {_described(row)}: rl.prompt_row(prompt, "
            "answer) makes such a row"
        )
        raise RowError(location, "row", reason)
    missing = [name for name in columns if name not in row and name not in _OPTIONAL]
    if missing:
        reason = (
            f"it is missing; the row has {', '.join(map(str, row))}: rl.prompt_row(prompt, answer) makes a whole row"
        )
        raise RowError(location, f"column {missing[0]!r}", reason)
    row = _whole(row)
    _check_messages(row["prompt"], location)
    check_parts(row, location)
    if not any(message["content"].strip() for message in with_texts(row)["prompt"]):
        raise RowError(location, "column 'prompt'", "the prompt is empty: remove the row, or give a message a text")
    for name in ("data_source", "ability"):
        if not isinstance(row[name], str):
            raise RowError(location, f"column {name!r}", f"expected a string, got {_described(row[name])}")
    for name in ("reward_model", "extra_info"):
        if name in columns and not isinstance(row[name], Mapping):
            raise RowError(location, f"column {name!r}", f"expected a mapping, got {_described(row[name])}")
    if "reward_model" in columns and "ground_truth" not in row["reward_model"]:
        raise RowError(location, "column 'reward_model'", "it has no 'ground_truth'")
    truth = row["reward_model"]["ground_truth"] if "reward_model" in columns else ""
    if truth is None:
        raise RowError(location, "column 'reward_model'", "'ground_truth' is null: give the answer, or '' for none")
    if isinstance(truth, bytes):
        raise RowError(
            location,
            "column 'reward_model'",
            f"'ground_truth' is bytes, {str(truth)[:40]}, which differ from every response, a text: write a text",
        )


def _check_messages(prompt: object, location: str) -> None:
    column = "column 'prompt'"
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        reason = f"expected a list of {{role, content}} messages, got {_described(prompt)}"
        hint = ": rl.prompt_row(text, answer) makes a message of a text" if isinstance(prompt, str) else ""
        raise RowError(location, column, reason + hint)
    for position, message in enumerate(prompt):
        for key, types in (("role", str), ("content", str | list)):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), types):
                raise RowError(location, column, f"message {position} has no string {key!r}")


class ParquetRows:
    """A parquet file, read a few rows at a time.

    Args:
        path: path of the file; only the schema is read at first.
        columns: names of the columns the file must have, but for optional columns.

    Raises:
        ConfigError: the file is missing, is not parquet, has no rows, lacks a column, or has two columns of one name.
    """

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS) -> None:
        if not path.is_file():
            found = "it is a folder: name the parquet files in it" if path.is_dir() else "there is no such file"
            raise ConfigError(f"{path}: {found}. `rl-plugins prepare --help` lists the data sets it can make")
        self.path = path
        try:
            # Without memory_map and pre_buffer, pyarrow holds a whole row group in memory.
            self._file = pq.ParquetFile(path, memory_map=True, pre_buffer=False)
            schema = self._file.schema_arrow
        except _DAMAGED as error:
            raise self._unreadable(error) from error
        names = Counter(schema.names)
        if twice := [name for name, times in names.items() if times > 1]:
            raise ConfigError(f"{path}: the file has several columns {twice[0]!r}: rename or remove all but one")
        missing = [name for name in columns if name not in names and name not in _OPTIONAL]
        if missing:
            raise ConfigError(f"{path}: column {missing[0]!r} is missing; the file has {', '.join(schema.names)}")
        metadata = self._file.metadata
        if metadata.num_rows == 0:
            raise ConfigError(f"{path}: the file has no rows")
        size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        self._batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * metadata.num_rows // max(1, size)))
        # An Arrow file holds one dictionary for all batches, a parquet file one for each batch.
        self.schema = pa.schema([
            field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema
        ])  # fmt: skip

    def batches(self) -> Iterator[tuple[pa.RecordBatch, list[dict[str, Any]]]]:
        """Yield all rows in batches of at most 1,024 rows and about 64 MiB, each batch also as Python objects.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            for batch in self._file.iter_batches(self._batch_rows, use_threads=False):
                batch = batch.cast(self.schema)
                rows = batch.to_pylist()
                yield batch, rows
        except _DAMAGED as error:
            raise self._unreadable(error) from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all rows as Python objects."""
        for _, rows in self.batches():
            yield from rows

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.path}: not a readable parquet file ({str(error).splitlines()[0].rstrip('.')}). `rl-plugins prepare "
            "jsonl` makes such a file from JSON lines"
        )


def _open_files(paths: Sequence[FilePath], columns: Sequence[str], form: RowForm | None) -> PromptRows:
    rows, origins, names = MappedRows(), [], dict.fromkeys(columns)
    for path in map(Path, paths):
        origins.append((str(path), len(rows)))
        file = ParquetRows(path, columns)
        names |= dict.fromkeys(file.schema.names if form is None else ())
        rows.append_file(_checked_batches(file, columns, names, form), file.schema)
    return PromptRows(_served(rows, form), origins, list(names), of_files=True)


def _checked_batches(
    file: ParquetRows, columns: Sequence[str], names: dict[str, None], form: RowForm | None
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file after a check of each row. Parts of messages may add the column of images."""
    number = 0
    for batch, rows in file.batches():
        for row in rows:
            names |= dict.fromkeys(_checked(row, f"{file.path}, row {number}", columns, form))
            number += 1
        yield batch


def _checked(row: Row, location: str, columns: Sequence[str], form: RowForm | None) -> Row:
    if form is not None:
        return form(row, location)
    check_row(row, location, columns)
    return with_texts(row)


def _served(rows: RowSource, form: RowForm | None) -> RowsWithTexts:
    if form is not None:
        return RowsWithTexts(rows, lambda row: form(row, "row"))
    return RowsWithTexts(rows, lambda row: _whole(with_texts(row)))


def _whole(row: Row) -> Row:
    """Return a row with the optional columns."""
    return {"ability": "general", "extra_info": {}, **row}


def _described(value: object) -> str:
    return "nothing (null)" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
