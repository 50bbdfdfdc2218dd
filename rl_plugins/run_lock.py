"""Lock of a folder for one run or pipeline. The kernel releases the lock when the process ends, also by `kill -9`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rl_plugins.errors import ConfigError
from rl_plugins.file_lock import FileLock
from rl_plugins.run_folder import RunFolder
from rl_plugins.whole_file import storage_errors


@contextmanager
def owned(folder: RunFolder, kind: Literal["run", "pipeline"] = "run") -> Iterator[None]:
    """Lock the folder of a run or a pipeline for this process. The folder must exist.

    Args:
        folder: the folder.
        kind: content of the folder. The stages of a pipeline have locks of their own.

    Raises:
        ConfigError: another process has the lock.
        StorageError: the file of the lock cannot be written.
    """
    with storage_errors(folder.lock):
        lock = FileLock(folder.lock)
    try:
        if not lock.take():
            owner = os.pread(lock.descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise ConfigError(
                f"{folder.path} belongs to a running {kind} ({owner}): wait for the end of the {kind}; give another "
                f"{'name' if kind == 'pipeline' else 'run.name'}; or, if that machine is gone, remove {folder.lock}"
            )
        if not lock.is_supported:
            print(f"{folder.path.name}: the file system has no locks: start the {kind} only once at a time", flush=True)
        with storage_errors(folder.lock):
            os.ftruncate(lock.descriptor, 0)
            os.pwrite(lock.descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        lock.close()
