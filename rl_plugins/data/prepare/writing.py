"""Write checked rows as parquet files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.data.parquet import check_row
from rl_plugins.data.prepare.layout import Rows


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
    temporary = {split: folder / f".{split}.{os.getpid()}.tmp" for split in splits}
    try:
        for split, rows in splits.items():
            pq.write_table(pa.Table.from_pylist(rows), temporary[split])
        for split, path in temporary.items():
            path.replace(targets[split])
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return targets
