"""Reading raw records (JSON lines, parquet, saved data sets), and writing parquet files whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.data.parquet import ParquetRows, check_row
from rl_plugins.errors import ConfigError
from rl_plugins.json_text import read_foreign_json
from rl_plugins.whole_file import storage_errors

Record = dict[str, Any]
RowList = list[dict[str, Any]]

_ROW_GROUP = 10_000
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")

# Raw records ------------------------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a file with their locations for messages; lines of JSON and rows of parquet count from 1.

    Raises:
        ConfigError: there is no such file, a line is not a JSON object or gives a key twice, or the file is CSV.
    """
    if path.suffix == ".parquet":
        rows = ParquetRows(path, columns=())
        yield from ((f"{path}, line {number}", row) for number, row in enumerate(rows, start=1))
        return
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    if path.suffix in (".csv", ".tsv"):
        raise ConfigError(
            f"{path}: a table of texts, and JSON lines or parquet are read: convert the file, such as with "
            f"pandas.read_csv({path.name!r}).to_parquet({path.with_suffix('.parquet').name!r})"
        )
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            location = f"{path}, line {number}"
            try:
                record = read_foreign_json(line, unique_keys=True)
            # A line that is not UTF-8, or a number of thousands of digits, is a ValueError, too.
            except ValueError as error:
                raise ConfigError(
                    f"{location}: not valid JSON ({error}): each line must be a JSON object, and the name of a parquet "
                    "file must end with .parquet"
                ) from error
            if not isinstance(record, dict):
                raise ConfigError(f"{location}: expected a JSON object, got {line.decode().strip()[:40]!r}")
            if (half := _half_of_a_character(line, record)) is not None:
                raise ConfigError(
                    f"{location}: {half} is half of a character, and texts have whole characters: write "
                    "both halves, or leave the half out"
                )
            yield location, record


def _half_of_a_character(line: bytes, record: Record) -> str | None:
    """Return the escape of a lone surrogate in a record; None if there is none. Only an escape can make one."""
    if not _ESCAPED_HALF.search(line):
        return None
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None


def read_split(
    folder: Path, split: str, keys: Sequence[str], make_row: Callable[[Record, str, int], dict[str, Any] | None]
) -> RowList:
    """Return `make_row(record, split, index)` for every record of the file `folder`/<split>.*.

    The function prints the number of records without an answer, which are left out.

    Args:
        folder: folder with one file of the split.
        split: name of the split: `train` or `test`.
        keys: keys of texts every record must have.
        make_row: function that makes a row, or None for a record without an answer; it raises a ValueError for a bad
            record.

    Raises:
        ConfigError: the file is missing or unreadable, no record has an answer, a record lacks a text, or `make_row`
            raises a ValueError. The message names the file and the line (or parquet row), counted from 1.
    """
    found = sorted(path for suffix in ("jsonl", "parquet") for path in folder.glob(f"{split}*.{suffix}"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ConfigError(f"{folder}: expected one {split}.jsonl or {split}.parquet, found {names}")
    rows: RowList = []
    without_answer: list[str] = []
    for index, (location, record) in enumerate(read_records(found[0])):
        for key in keys:
            if not isinstance(record.get(key), str):
                raise ConfigError(f"{location}: no text under {key!r}; the record has {', '.join(record)}")
        try:
            row = make_row(record, split, index)
        except ValueError as error:
            raise ConfigError(f"{location}: {error}") from error
        if row is None:
            without_answer.append(location)
        else:
            rows.append(row)
    if not rows:
        raise ConfigError(f"{found[0]}: there is no record with an answer: write records, or name another folder")
    if without_answer:
        print(f"{len(without_answer)} records without an answer are left out, such as {without_answer[0]}")
    return rows


def saved_splits(folder: Path) -> dict[str, Path]:
    """Return the folder of each split of a data set written with `save_to_disk`; a data set without splits is `train`.

    Raises:
        ConfigError: the folder holds no such data set.
    """
    if (folder / "dataset_dict.json").is_file():
        return {name: folder / name for name in _read_entry(folder / "dataset_dict.json", "splits")}
    if (folder / "state.json").is_file():
        return {"train": folder}
    raise ConfigError(
        f"{folder}: no data set written with save_to_disk (such a folder has a dataset_dict.json or a state.json); "
        "`rl-plugins prepare jsonl` reads JSON lines and parquet files"
    )


def _read_entry(file: Path, key: str) -> list[Any]:
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: not readable ({type(error).__name__}: {error}): save the data set again") from None


def read_saved(folder: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a split written with `save_to_disk`, with their locations, counted from 1.

    Raises:
        ConfigError: a file of the split is missing or unreadable.
    """
    number = 0
    for file in _read_entry(folder / "state.json", "_data_files"):
        path = folder / file["filename"]
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as batches:
                for batch in batches:
                    for record in batch.to_pylist():
                        number += 1
                        yield f"{folder}, row {number}", record
        except (OSError, pa.ArrowInvalid) as error:
            raise ConfigError(f"{path}: not a readable arrow file ({str(error).splitlines()[0]})") from error


# Parquet files of rows --------------------------------------------------------------------------------------------


def write_rows(rows: Iterable[tuple[str, dict[str, Any]]], schema: pa.Schema, folder: Path) -> dict[str, int]:
    """Write rows to `folder`/<split>.parquet, a few rows in memory at a time.

    If making or writing a row fails, the folder stays unchanged.

    Args:
        rows: name of the split and the row.
        schema: schema of every file.
        folder: folder of the files; created if necessary.

    Returns:
        The number of rows of each split.

    Raises:
        ConfigError: a row does not fit the schema.
        StorageError: a file cannot be written.
    """
    waiting: dict[str, RowList] = {}
    counts: dict[str, int] = {}
    with storage_errors(folder), ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}
        temporary: dict[str, Path] = {}

        def write(split: str) -> None:
            try:
                table = pa.Table.from_pylist(waiting.pop(split), schema)
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise ConfigError(f"{split}, row {counts[split]} or one shortly before: {error}") from error
            writers[split].write_table(table)

        for split, row in rows:
            if split not in writers:
                temporary[split] = stack.enter_context(_temporary_file(folder, split))
                writers[split] = stack.enter_context(pq.ParquetWriter(temporary[split], schema))
            waiting.setdefault(split, []).append(row)
            counts[split] = counts.get(split, 0) + 1
            if len(waiting[split]) == _ROW_GROUP:
                write(split)
        for split in list(waiting):
            write(split)
        for split, writer in writers.items():
            writer.close()
            temporary[split].replace(folder / f"{split}.parquet")
    return counts


def write_splits(splits: Mapping[str, RowList], folder: Path) -> dict[str, Path]:
    """Check the rows of all splits, write `folder`/<split>.parquet for each, and return the paths.

    If all rows of a split have an empty `extra_info`, each row gets the name of the split and the number of the row.

    Raises:
        ConfigError: a row is malformed; the message names the split, the row and the column.
        StorageError: a file cannot be written.
    """
    for split, rows in splits.items():
        for number, row in enumerate(rows):
            check_row(row, f"{split}, row {number}")
    with storage_errors(folder), ExitStack() as stack:
        temporary = {split: stack.enter_context(_temporary_file(folder, split)) for split in splits}
        for split, rows in splits.items():
            pq.write_table(pa.Table.from_pylist(_with_extra_info(split, rows)), temporary[split])
        targets = {split: folder / f"{split}.parquet" for split in splits}
        for split, path in temporary.items():
            path.replace(targets[split])
    return targets


def _with_extra_info(split: str, rows: RowList) -> RowList:
    if any(row["extra_info"] for row in rows):
        return rows
    # Parquet has no mapping without a key.
    return [{**row, "extra_info": {"split": split, "index": number}} for number, row in enumerate(rows)]


@contextmanager
def _temporary_file(folder: Path, split: str) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    # Processes of two machines that share the folder may have the same number.
    path = folder / f".{split}.{uuid4().hex}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
