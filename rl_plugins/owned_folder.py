"""Temporary folders with an owner: a killed process leaves a folder, and the next process removes the folder.

A lock on the folder shows that the owner lives. The operating system drops the lock at the end of the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
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
    remove_ownerless(prefix, parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another process may see the folder before the lock, and remove the folder.
        with suppress(FileNotFoundError):
            lock = FileLock(folder, os.O_RDONLY)
            if lock.take() and folder.is_dir():
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
                return folder
            lock.close()


def remove_ownerless(prefix: str, parent: Path | None = None) -> None:
    """Remove the folders of ended processes. A file system without locks keeps the folders.

    Args:
        prefix: beginning of the names of the folders.
        parent: folder around the folders; by default the folder for temporary files.
    """
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        # Another process has removed the folder, or the folder belongs to another user.
        with suppress(OSError), ExitStack() as stack:
            lock = FileLock(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(lock.close)
            if lock.take() and lock.is_supported:
                shutil.rmtree(folder, ignore_errors=True)
