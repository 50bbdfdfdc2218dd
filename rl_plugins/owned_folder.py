"""Temporary folders with an owner: a killed process leaves a folder, and the next process removes the folder.

A lock on the folder shows that the owner lives. The operating system drops the lock at the end of the process.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

_held: set[int] = set()


def _close_all() -> None:
    while _held:
        os.close(_held.pop())


# A forked process would keep the lock after the end of the owner.
os.register_at_fork(after_in_child=_close_all)


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
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        # A file system without locks keeps the folders of killed processes.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another process may see the folder before the lock, and remove the folder.
        if folder.is_dir():
            _held.add(descriptor)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            return folder
        os.close(descriptor)


def remove_ownerless(prefix: str, parent: Path | None = None) -> None:
    """Remove the folders of ended processes.

    Args:
        prefix: beginning of the names of the folders.
        parent: folder around the folders; by default the folder for temporary files.
    """
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        # The owner lives, another process has removed the folder, or the folder belongs to another user.
        with suppress(OSError), ExitStack() as stack:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
