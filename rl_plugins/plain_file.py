"""Files of tensors and plain values. Such a file is read as data: reading never runs code from the file.

`torch.save` writes a pickle. `torch.load(weights_only=True)` refuses every class in the pickle, except for tensors,
plain values and a list of harmless classes. Writing and reading have the same list, so each written file can
be read.
"""

from __future__ import annotations

import datetime
import decimal
import os
import pickle
import re
import struct
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import BufferedWriter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rl_plugins.errors import CheckpointError, DataError

if TYPE_CHECKING:
    import torch

READ_BYTES = 2**22
"""Bytes of a file that are read or written at once."""
_UNREADABLE = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, struct.error,
)  # fmt: skip
"""Errors of `torch.load` for a damaged file."""


@dataclass(frozen=True)
class FileDigest:
    """Size and digest of a file.

    Attributes:
        bytes: number of bytes.
        digest: BLAKE3 of the content, in hexadecimal digits.
    """

    bytes: int
    digest: str


class HashedFile:
    """A new file. The digest of its content is computed while the file is written.

    `write` never raises, because `torch.save` would hide the error of a full disk behind another error. `finish`
    raises the first error.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        from blake3 import blake3

        self._hash, self._bytes = blake3(), 0
        self._file: BufferedWriter | None = None
        self._error: OSError | None = None
        try:
            self._file = path.open("wb")
        except OSError as error:
            self._error = error

    def write(self, content: bytes | memoryview) -> int:
        """Append bytes to the file; return the number of bytes."""
        size = memoryview(content).nbytes
        if self._file is not None and self._error is None:
            try:
                self._file.write(content)
            except OSError as error:
                self._error = error
            self._hash.update(content)
        self._bytes += size
        return size

    def tell(self) -> int:
        """Return the number of written bytes."""
        return self._bytes

    def flush(self) -> None:
        """Do nothing: `finish` writes the whole content to the disk."""

    def close(self) -> None:
        """Do nothing: `finish` closes the file."""

    def finish(self) -> FileDigest:
        """Wait until the disk has the content, and close the file.

        Raises:
            OSError: a part of the content could not be written.
        """
        if self._file is not None:
            for finish in (self._file.flush, self._synchronize, self._file.close):
                try:
                    finish()
                except OSError as error:
                    self._error = self._error or error
        if self._error is not None:
            raise self._error
        return FileDigest(self._bytes, self._hash.hexdigest())

    def _synchronize(self) -> None:
        if self._file is not None and self._error is None:
            os.fsync(self._file.fileno())


def read_record(path: Path) -> FileDigest:
    """Read a file, and return its size and digest."""
    from blake3 import blake3

    digest, size = blake3(), 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
            size += len(part)
    return FileDigest(size, digest.hexdigest())


def save_plain(value: object, path: Path, *, records: Sequence[type] = ()) -> FileDigest:
    """Write tensors and plain values to a file for `load_plain`.

    Args:
        value: tensors, arrays, numbers, texts, bytes, dates, and lists, tuples, sets and dictionaries of such values.
        path: path of the file.
        records: further classes of values, whose instances are plain records.

    Raises:
        OSError: the file cannot be written.
        DataError: the value contains an object of another class.
    """
    import torch

    file = HashedFile(path)
    torch.save(value, file)  # type: ignore[arg-type]
    record = file.finish()
    check_plain(path, path, records=records)
    return record


def check_plain(content: Path | IO[bytes], path: Path, *, records: Sequence[type] = ()) -> None:
    """Check that `load_plain` can read what `torch.save` has written.

    Args:
        content: written file.
        path: path of the file, for the message.
        records: further classes of values, as in `save_plain`.

    Raises:
        DataError: the file holds an object of another class.
    """
    import torch

    with torch.serialization.safe_globals([*_harmless(), *records]):
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(content)
    if refused:
        raise DataError(
            f"{path} would hold objects that are code ({', '.join(sorted(refused))}), and only data is read back: keep "
            "numbers, texts, arrays, tensors, lists and dictionaries in the states of callbacks, in hyperparameters "
            "and in the columns of the data"
        )


def load_plain(
    path: Path, *, records: Sequence[type] = (), mmap: bool = False, device: torch.device | str = "cpu"
) -> Any:
    """Read a file of `save_plain`.

    Args:
        path: path of the file.
        records: further classes of values, as in `save_plain`.
        mmap: read the content of a tensor at its first use.
        device: device of the tensors.

    Raises:
        CheckpointError: the file is missing, damaged, or holds code.
    """
    import torch

    try:
        with torch.serialization.safe_globals([*_harmless(), *records]):
            return torch.load(path, map_location=device, weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: use another file or checkpoint") from None
    except IsADirectoryError:
        raise CheckpointError(
            f"{path} is a folder: name a file, in the folder of a checkpoint its entry `state`"
        ) from None
    except _UNREADABLE as error:
        reason = _reason(str(error))
        if ": torchao.optim." in reason and "torchao.optim" not in sys.modules and find_spec("torchao"):
            # The library declares the classes of its 8-bit states as harmless.
            import_module("torchao.optim")
            return load_plain(path, records=records, mmap=mmap, device=device)
        raise CheckpointError(f"{path} cannot be read as data ({reason}): use another file or checkpoint") from error


def _reason(message: str) -> str:
    """Return the reason in an error of `torch.load`, without the advice to trust the file."""
    if refused := re.search(r"GLOBAL (\S+) (?:was not|whose module)", message):
        return f"it holds code: {refused[1]}"
    message = message.rpartition("WeightsUnpickler error:")[2]
    return " ".join(message.split())[:160] or "the file ends too early"


@cache
def _harmless() -> list[Any]:
    """Return classes whose instances are plain values: arrays of numpy, dates, decimal numbers."""
    import numpy as np

    dtypes = [np.bool_, np.str_, np.bytes_, np.object_, *np.sctypeDict.values()]
    return [
        np.ndarray,
        np.dtype,
        # The functions that numpy names in the pickle of an array and of a number.
        np.empty(0).__reduce__()[0],
        np.float32(0).__reduce__()[0],
        *{type(np.dtype(scalar)) for scalar in dtypes},
        frozenset,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        uuid.UUID,
    ]
