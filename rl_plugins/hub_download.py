"""One download on each machine: a process that holds the lock of a repository downloads, and the others wait."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_plugins.errors import DeadlineExceeded

_STALL_S = 300.0
_PAUSE_S = 0.2
# A cache that is read-only, or on a file system without locks, has no lock.
_NO_LOCKS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def only_download(name: str, folder: Path, stall_s: float = _STALL_S) -> Iterator[None]:
    """Hold the lock of a repository, so that this process alone downloads. The lock ends with the process.

    Args:
        name: name of the repository, for messages.
        folder: folder of the repository in the cache of the hub.
        stall_s: longest wait in seconds while the folder does not grow.

    Raises:
        DeadlineExceeded: another process holds the lock, and the folder has not grown.
    """
    descriptor = _open(folder.parent / ".locks" / folder.name / "rl_plugins.lock")
    if descriptor is None:
        yield
        return
    try:
        size, since = -1, time.monotonic()
        while not _lock(descriptor):
            if (now := _bytes(folder)) != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > stall_s:
                raise DeadlineExceeded(
                    f"this process waited for another process of this machine to download {name} from the hub, and for "
                    f"{stall_s:g} s {folder} has not grown beyond {size} bytes: end the other process, or correct its "
                    "network"
                )
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(descriptor)


def _open(file: Path) -> int | None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None


def _lock(descriptor: int) -> bool:
    """Return True if this process has the lock, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _bytes(folder: Path) -> int:
    """Return the bytes of the files that are downloaded, also of incomplete files."""
    total = 0
    for file in (folder / "blobs").glob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            # A download that is complete gets another name.
            continue
    return total
