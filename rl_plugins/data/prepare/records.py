"""Raw records, one at a time: from JSON lines, parquet files, and data sets that were saved with `save_to_disk`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from rl_plugins.data.parquet import ParquetRows
from rl_plugins.errors import ConfigError

Record = dict[str, Any]


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a file with their places for messages: lines of JSON and rows of parquet count from 1.

    Raises:
        ConfigError: there is no such file, or a line of it is not a JSON object.
    """
    if path.suffix == ".parquet":
        rows = (row for batch in ParquetRows(path, columns=()).batches() for row in batch.to_pylist())
        yield from ((f"{path}, line {number}", row) for number, row in enumerate(rows, start=1))
        return
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}: not valid JSON ({error}).") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{where}: expected a JSON object, got {line.strip()[:40]!r}.")
            yield where, record


def saved_splits(folder: Path) -> dict[str, Path]:
    """Return the folder of each split of a data set that was saved with `save_to_disk`; one without splits is `train`.

    Raises:
        ConfigError: the folder holds no such data set.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return {name: folder / name for name in splits}
    if (folder / "state.json").is_file():
        return {"train": folder}
    raise ConfigError(
        f"{folder}: no data set that was saved with save_to_disk (it has a dataset_dict.json or a state.json); "
        "`rl-plugins prepare jsonl` reads JSON lines and parquet files"
    )


def read_saved(folder: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a split that was saved with `save_to_disk`, with their places, counted from 1.

    Raises:
        ConfigError: a file of it is missing or unreadable.
    """
    number = 0
    for file in json.loads((folder / "state.json").read_text())["_data_files"]:
        path = folder / file["filename"]
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as batches:
                for batch in batches:
                    for record in batch.to_pylist():
                        number += 1
                        yield f"{folder}, row {number}", record
        except (OSError, pa.ArrowInvalid) as error:
            raise ConfigError(f"{path}: not a readable arrow file ({str(error).splitlines()[0]})") from error
