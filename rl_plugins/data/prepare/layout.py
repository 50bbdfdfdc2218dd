"""What a layout is, and the reading of raw files that layouts share."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plugins.data.prepare.records import read_records
from rl_plugins.errors import ConfigError

SPLITS = ("train", "test")
Rows = list[dict[str, Any]]
MakeRow = Callable[[dict[str, Any], str, int], dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    """A kind of raw data.

    Attributes:
        summary: one line for `--help`.
        add_arguments: adds the layout's own options to its command.
        build: returns the rows of each split; a ConfigError names the raw file and line at fault.
    """

    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    build: Callable[[Namespace], dict[str, Rows]]


def add_raw_arguments(parser: ArgumentParser, instruction: str) -> None:
    """Add the options of the layouts that read a folder of questions."""
    parser.add_argument("--input", type=Path, required=True, help="folder with train.* and test.* (jsonl or parquet)")
    parser.add_argument(
        "--instruction", default=instruction, help="text appended to every question (default: %(default)r)"
    )


def build_splits(folder: Path, keys: Sequence[str], make_row: MakeRow) -> dict[str, Rows]:
    """Return `make_row(record, split, index)` of every record of `folder`/train.* and `folder`/test.*.

    Raises:
        ConfigError: a raw file is missing or unreadable, a record has no text under one of `keys`, or
            `make_row` raises a ValueError; names the file and the line (the row, in a parquet file), counted
            from 1.
    """
    splits: dict[str, Rows] = {}
    for split in SPLITS:
        path = _find(folder, split)
        splits[split] = []
        for index, (where, record) in enumerate(read_records(path)):
            for key in keys:
                if not isinstance(record.get(key), str):
                    raise ConfigError(f"{where}: no text under {key!r}; it has {', '.join(record)}.")
            try:
                splits[split].append(make_row(record, split, index))
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from error
    return splits


def _find(folder: Path, split: str) -> Path:
    found = sorted(path for suffix in ("jsonl", "parquet") for path in folder.glob(f"{split}*.{suffix}"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ConfigError(f"{folder}: expected one {split}.jsonl or {split}.parquet, found {names}.")
    return found[0]
