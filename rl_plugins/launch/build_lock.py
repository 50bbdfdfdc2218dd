"""Locks that a killed build of a torch extension left behind.

DeepSpeed builds its ops on first use through torch's extension loader, which creates
`<extensions_dir>/<op>/lock`, keeps it open while it builds, and removes it at the end. A process killed in
between leaves the file, and every later start waits for it for ever without a word. The owner is whoever has
the file open: a lock that no process of this machine has open is nobody's. The folder must therefore not be
shared between machines. (Source: torch.utils.file_baton.FileBaton.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from rl_plugins.errors import ConfigError

LONGEST_BUILD_SECONDS = 30 * 60.0


def clear_stale_build_locks(
    extensions_dir: Path, *, longest_build_seconds: float = LONGEST_BUILD_SECONDS
) -> list[Path]:
    """Removes the build locks under `extensions_dir` that no living process holds, and returns them.

    A lock with a living owner stays: that build will end, unless it is older than `longest_build_seconds`.

    Args:
        extensions_dir: torch's extensions folder (TORCH_EXTENSIONS_DIR); it need not exist.
        longest_build_seconds: the age from which a build counts as hung.

    Raises:
        ConfigError: a lock's owner seems to hang, cannot be looked up, or the lock cannot be removed.
    """
    locks = [lock for lock in sorted(extensions_dir.glob("**/lock")) if lock.is_file()]
    if not locks:
        return []
    owners = _processes_with_open(locks)
    removed = []
    for lock in locks:
        try:
            status = lock.stat()
        except FileNotFoundError:  # its build has just ended
            continue
        if lock in owners:
            age = time.time() - status.st_mtime
            if age > longest_build_seconds:
                raise ConfigError(
                    f"Process {owners[lock]} has been building an extension for {age / 60:.0f} minutes "
                    f"and holds {lock}: end that process, delete the file, then start again."
                )
            continue
        if status.st_uid != os.geteuid() and os.geteuid() != 0:
            raise ConfigError(
                f"{lock} belongs to another user (uid {status.st_uid}), whose builds are invisible here: "
                "set TORCH_EXTENSIONS_DIR to a folder of your own, or delete the file if no build is running."
            )
        try:
            lock.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"A killed build left {lock}, which every start would wait for, and it cannot be removed "
                f"({error.strerror}): delete it."
            ) from error
        removed.append(lock)
    return removed


def _processes_with_open(files: Iterable[Path]) -> dict[Path, int]:
    """File -> id of a process that has it open, for the processes that this user may look into."""
    wanted = {os.path.realpath(file): file for file in files}
    owners: dict[Path, int] = {}
    for process in psutil.process_iter():
        try:
            opened = [entry.path for entry in process.open_files()]
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        owners.update({wanted[path]: process.pid for path in opened if path in wanted})
    return owners
