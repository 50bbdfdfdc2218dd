"""Locks of killed builds of torch extensions.

DeepSpeed builds its ops at the first use through torch's extension loader. The loader creates
`<extensions_dir>/<op>/lock`, keeps the file open during the build, and removes the file at the end. A killed build
leaves the file, and every later start waits silently and forever for its removal. The owner of a lock is a process with
the open file. A lock without an owner on this machine is stale. Therefore machines must not share the folder.
(Source: torch.utils.file_baton.FileBaton.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from rl_plugins.errors import ConfigError

_LONGEST_BUILD_S = 30 * 60.0
"""Age of a build, in seconds, above which the build counts as hung."""


_OPS = ("deepspeed_shm_comm", "cpu_adam", "fused_adam", "async_io")
"""Names of DeepSpeed's ops. In the first moment of a build, the lock exists and build.ninja does not."""


def extensions_folder() -> Path:
    """Return the folder in which torch builds extensions, as torch.utils.cpp_extension does, but without torch."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")


def clear_stale_build_locks(extensions_dir: Path) -> list[Path]:
    """Remove the build locks without a living owner.

    A lock with a living owner stays, because the build will end. Files named `lock` that are not beside a build stay.

    Args:
        extensions_dir: Torch's extensions folder (TORCH_EXTENSIONS_DIR). The folder need not exist.

    Returns:
        Paths of the removed locks.

    Raises:
        ConfigError: the owner of a lock hangs or is unknown, or the lock cannot be removed.
    """
    locks = [lock for lock in _locks_of_builds(extensions_dir) if lock.is_file()]
    if not locks:
        return []
    owners = _processes_with_open(locks)
    removed = []
    for lock in locks:
        try:
            status = lock.stat()
        except FileNotFoundError:  # The build has just ended.
            continue
        if lock in owners:
            age = time.time() - status.st_mtime
            if age > _LONGEST_BUILD_S:
                raise ConfigError(
                    f"process {owners[lock]} has been building an extension for {age / 60:.0f} minutes "
                    f"and holds {lock}. End the process, delete the file, and start again"
                )
            continue
        if status.st_uid != os.geteuid() and os.geteuid() != 0:
            raise ConfigError(
                f"{lock} belongs to another user (uid {status.st_uid}), so this run cannot see if a build is running. "
                "Set TORCH_EXTENSIONS_DIR to your own folder, or delete the file if no build is running"
            )
        try:
            lock.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"a killed build left {lock}, and every start would wait for its removal. This run cannot remove the "
                f"file ({error.strerror}). Delete the file"
            ) from error
        removed.append(lock)
    return removed


def _locks_of_builds(extensions_dir: Path) -> list[Path]:
    """Return the locks of ops. Torch may have a folder for each version of Python and CUDA around the ops' folders."""
    found = sorted([*extensions_dir.glob("*/lock"), *extensions_dir.glob("*/*/lock")])
    return [lock for lock in found if lock.parent.name in _OPS or lock.with_name("build.ninja").exists()]


def _processes_with_open(files: Iterable[Path]) -> dict[Path, int]:
    """Return the id of a process with the open file, for each open file. Processes of other users are left out."""
    wanted = {os.path.realpath(file): file for file in files}
    owners: dict[Path, int] = {}
    for process in psutil.process_iter():
        try:
            opened = [entry.path for entry in process.open_files()]
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        owners.update({wanted[path]: process.pid for path in opened if path in wanted})
    return owners
