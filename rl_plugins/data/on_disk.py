"""Rows and token ids in memory-mapped files: a data set of any size takes a few bytes of memory per row.

The files lie in the folder for temporary files (TMPDIR) and are unlinked as soon as they are mapped, so a killed
process leaves no file behind. Every row can be read directly, so the training order may be any permutation. (A parquet
reader decodes a whole row group for one row.)
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from rl_plugins.data.sequence_with_slices import SequenceWithSlices
from rl_plugins.errors import StorageError
from rl_plugins.whole_file import FULL


class MappedRows(SequenceWithSlices[Mapping[str, Any]]):
    """Rows in memory-mapped files of Arrow's format; a row becomes a Python object on access."""

    def __init__(self) -> None:
        """Start without rows."""
        self._batches: list[tuple[Any, int]] = []
        self._starts: list[int] = []
        self._rows = 0

    def append_file(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
        """Write the batches to a file, map the file and append its rows.

        Args:
            batches: the rows.
            schema: schema of every batch; files may have different schemas.

        Raises:
            StorageError: the disk is full.
        """
        sizes = []
        with _named_full_disk(), tempfile.NamedTemporaryFile(prefix="rl_plugins_rows_") as file:
            with pa.ipc.new_file(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    sizes.append(batch.num_rows)
            file.flush()
            reader = pa.ipc.open_file(pa.memory_map(file.name))
        for number, size in enumerate(sizes):
            self._batches.append((reader, number))
            self._starts.append(self._rows)
            self._rows += size

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    def item(self, number: int) -> Mapping[str, Any]:
        """Return a row."""
        if not 0 <= number < self._rows:
            raise IndexError(f"row {number} of {self._rows}")
        place = bisect_right(self._starts, number) - 1
        reader, batch = self._batches[place]
        row: Mapping[str, Any] = reader.get_batch(batch).slice(number - self._starts[place], 1).to_pylist()[0]
        return row

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield all rows, one batch in memory at a time."""
        for reader, number in self._batches:
            yield from reader.get_batch(number).to_pylist()


class MappedLists(SequenceWithSlices[list[Any]]):
    """Lists of numbers, such as token ids, in one memory-mapped file.

    Args:
        lists: the lists; read once, one in memory at a time.
        dtype: NumPy type of the numbers.

    Attributes:
        lengths: int64 [N], length of each list.

    Raises:
        StorageError: the disk is full.
    """

    def __init__(self, lists: Iterable[Sequence[float]], dtype: type[np.generic] = np.int32) -> None:
        lengths = []
        with _named_full_disk(), tempfile.TemporaryFile(prefix="rl_plugins_tokens_") as file:
            for numbers in lists:
                file.write(np.asarray(numbers, dtype=dtype).tobytes())
                lengths.append(len(numbers))
            file.flush()
            self.lengths = np.asarray(lengths, dtype=np.int64)
            self._ends = np.cumsum(self.lengths)
            # An empty file cannot be mapped.
            self._numbers = np.memmap(file, dtype, "r") if self.lengths.any() else np.empty(0, dtype)

    def __len__(self) -> int:
        """Return the number of lists."""
        return len(self.lengths)

    def item(self, number: int) -> list[Any]:
        """Return one list."""
        if not 0 <= number < len(self):
            raise IndexError(f"list {number} of {len(self)}")
        end = self._ends[number]
        numbers: list[Any] = self._numbers[end - self.lengths[number] : end].tolist()
        return numbers


@contextmanager
def _named_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Without a folder for temporary files, tempfile raises a FileNotFoundError without a name.
        folder = os.environ.get("TMPDIR", "/tmp") if error.filename is None else tempfile.gettempdir()
        is_refused = isinstance(error, FileNotFoundError | PermissionError) and folder in str(error.filename or folder)
        if error.errno not in FULL and not is_refused:
            raise
        reason = "the disk is full" if error.errno in FULL else f"no file can be written here ({error.strerror})"
        raise StorageError(
            f"{folder}: {reason}. Every worker writes its rows and token ids to this folder: "
            "make room (about the size of the uncompressed data per worker), or name another folder with TMPDIR"
        ) from error
