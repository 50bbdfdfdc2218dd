"""Files written completely or not at all, and one clear line if the disk is full or a folder is read-only."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from rl_plugins.errors import ConfigError, StorageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk."""


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a temporary file beside `path`, then rename the file to `path`. Make the folder if missing.

    The disk has the content before the file has its name, so a loss of power leaves no empty file behind.

    Raises:
        StorageError: the file cannot be written. An earlier file at `path` is unchanged.
    """
    # Processes in containers have equal numbers.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            synchronize(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_whole_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, like `write_whole`."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))


def synchronize(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_text(path: Path, text: str) -> None:
    """Append a text in UTF-8 to a file. Make the folder if missing.

    Raises:
        StorageError: the file cannot be written.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or copy the file on a file system without links.

    Raises:
        OSError: the file does not exist, or cannot be copied.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def only_printed() -> Iterator[None]:
    """Print the error of a file that cannot be written, or of a damaged file that is read.

    Notes and reports never end a run, nor hide another error.
    """
    try:
        yield
    except (StorageError, ConfigError) as error:
        print(error, flush=True)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an error of the file system inside this context into one clear line.

    Args:
        path: written file or folder.

    Raises:
        StorageError: the context raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(cannot_write(path, error)) from error


def cannot_write(path: Path, error: OSError) -> str:
    """Return one line about a failed write: the path, the reason and the way out."""
    way_out = "make room on its disk" if error.errno in FULL else "make its folder writable"
    return f"{path} cannot be written ({error.strerror or error}): {way_out}, then repeat the command"
