"""Temporary folders with an owner: a killed process leaves a folder, and the next process removes the folder.

A lock on the folder shows that the owner lives. The operating system drops the lock at the end of the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path

from rl_plugins.file_lock import FileLock


def owned_folder(prefix: str, parent: Path | None = None) -> Path:
    """Make a folder for this process, and remove folders of ended processes with the same prefix.

    The folder is removed at the exit of this process.

    Args:
        prefix: beginning of the name of the folder.
        parent: folder around the folder; by default the folder for temporary files.

    Raises:
        OSError: the folder cannot be made.
    """
    folder, _ = _locked_folder(prefix, parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def owned_in_context(prefix: str, parent: Path) -> Iterator[Path]:
    """Make a folder like `owned_folder`, and remove the folder at the end of this context.

    `parent` may be on a shared file system, whose locks of folders are those of one machine. Only folders of this
    machine are removed.

    Args:
        prefix: beginning of the name of the folder.
        parent: folder around the folder.

    Raises:
        OSError: the folder cannot be made.
    """
    folder, lock = _locked_folder(f"{prefix}{socket.gethostname()}.", parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _locked_folder(prefix: str, parent: Path | None) -> tuple[Path, FileLock]:
    remove_ownerless(prefix, parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another process may see the folder before the lock, and remove the folder.
        with suppress(FileNotFoundError):
            lock = FileLock(folder, os.O_RDONLY)
            if lock.take() and folder.is_dir():
                return folder, lock
            lock.close()


def remove_ownerless(prefix: str, parent: Path | None = None) -> None:
    """Remove the folders of ended processes. A file system without locks keeps the folders.

    Args:
        prefix: beginning of the names of the folders.
        parent: folder around the folders; by default the folder for temporary files.
    """
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{escape(prefix)}*"):
        # Another process has removed the folder, or the folder belongs to another user.
        with suppress(OSError), ExitStack() as stack:
            lock = FileLock(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(lock.close)
            if lock.take() and lock.is_supported:
                shutil.rmtree(folder, ignore_errors=True)
