"""Write checked rows as parquet files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.data.parquet import check_row
from rl_plugins.data.prepare.layout import Rows
from rl_plugins.errors import ConfigError

_ROW_GROUP = 10_000


def write_rows(rows: Iterable[tuple[str, dict[str, Any]]], schema: pa.Schema, folder: Path) -> dict[str, int]:
    """Write rows that come with the names of their splits to `folder`/<split>.parquet; returns how many each has.

    A few rows are in memory at a time. If a row cannot be had or written, the folder stays as it was.

    Raises:
        ConfigError: a row does not fit the schema.
    """
    waiting: dict[str, Rows] = {}
    counts: dict[str, int] = {}
    with ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}

        def write(split: str) -> None:
            try:
                table = pa.Table.from_pylist(waiting.pop(split), schema)
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise ConfigError(f"{split}, row {counts[split]} or one shortly before: {error}") from error
            writers[split].write_table(table)

        for split, row in rows:
            if split not in writers:
                temporary = stack.enter_context(_temporary(folder, split))
                writers[split] = stack.enter_context(pq.ParquetWriter(temporary, schema))
            waiting.setdefault(split, []).append(row)
            counts[split] = counts.get(split, 0) + 1
            if len(waiting[split]) == _ROW_GROUP:
                write(split)
        for split in list(waiting):
            write(split)
        for split, writer in writers.items():
            writer.close()
            _name(folder, split).replace(folder / f"{split}.parquet")
    return counts


@contextmanager
def _temporary(folder: Path, split: str) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield _name(folder, split)
    finally:
        _name(folder, split).unlink(missing_ok=True)


def _name(folder: Path, split: str) -> Path:
    return folder / f".{split}.{os.getpid()}.tmp"


def write_splits(splits: Mapping[str, Rows], folder: Path) -> dict[str, Path]:
    """Write `folder`/<split>.parquet for every split, all of them checked first, and return the paths.

    Raises:
        ConfigError: a row is malformed; names the split, the row and the column.
    """
    for split, rows in splits.items():
        for number, row in enumerate(rows):
            check_row(row, f"{split}, row {number}")
    folder.mkdir(parents=True, exist_ok=True)
    targets = {split: folder / f"{split}.parquet" for split in splits}
    temporary = {split: _name(folder, split) for split in splits}
    try:
        for split, rows in splits.items():
            pq.write_table(pa.Table.from_pylist(rows), temporary[split])
        for split, path in temporary.items():
            path.replace(targets[split])
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return targets
