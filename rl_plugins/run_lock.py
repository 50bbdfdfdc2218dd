"""One run owns its folder: a lock until the end of its process, also after `kill -9`."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.whole_file import storing

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[int] = set()


def _close_all() -> None:
    while _held:
        os.close(_held.pop())


# A fork shares the lock. Without this line, a forked process of a reward would keep the lock after the run's end.
os.register_at_fork(after_in_child=_close_all)


@contextmanager
def owned(folder: RunFolder) -> Iterator[None]:
    """Lock the folder of a run for this process. The folder must exist.

    Raises:
        ConfigError: another process has the lock.
        StorageError: the file of the lock cannot be written.
    """
    with storing(folder.lock):
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise ConfigError(
                f"{folder.path} belongs to a running run ({owner}): wait for the end of the run, or give another "
                "run.name"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"{folder.path.name}: the file system has no locks: start the run only once at a time", flush=True)
        with storing(folder.lock):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        # In a forked process, the descriptor is closed already.
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)
