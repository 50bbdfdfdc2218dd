"""Lock on a file or folder for a process. The lock ends with the process, also after `kill -9`."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_open: set[int] = set()


def _close_all() -> None:
    while _open:
        os.close(_open.pop())


# A fork shares the lock. Without this line, a forked process of a reward would keep the lock after the run's end.
os.register_at_fork(after_in_child=_close_all)


class FileLock:
    """Open file or folder that one process at a time can lock. A forked process has neither the file nor the lock.

    Args:
        path: file, made if it is missing; or an existing folder.
        flags: flags of `os.open`.

    Attributes:
        descriptor: descriptor of the open file.
        is_supported: False if the file system has no locks. Then every process takes the lock.

    Raises:
        OSError: the file cannot be opened.

    Example:
        lock = FileLock(path)
        try:
            if lock.take():
                write(path)
        finally:
            lock.close()
    """

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        self.descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        self.is_supported = True
        _open.add(self.descriptor)

    def take(self) -> bool:
        """Return True if this process has the lock now, and False if another process has the lock.

        Raises:
            OSError: the file cannot be locked for another reason.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.is_supported = False
        return True

    def close(self) -> None:
        """Close the file, and end the lock. In a forked process, the file is closed already."""
        if self.descriptor in _open:
            _open.remove(self.descriptor)
            os.close(self.descriptor)
