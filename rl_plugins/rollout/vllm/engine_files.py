"""Files of a vLLM engine, which must not stay after the engine: sockets, meeting point, shared memory, a semaphore.

vLLM removes its files at an orderly end, and Python has a process that removes files after a kill. Ray kills an actor
with all of its children, so nobody removes the files of an actor's engine.

- Sockets and the file where the processes of an engine meet are in a folder of the engine, which is an `owned_folder`.
- Shared memory has no name after the start, so the memory ends with the last process.
- The lock of progress bars has no name.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from threading import RLock

import psutil

from rl_plugins.owned_folder import owned_folder

ENGINE_FOLDERS = "rl-vllm-"
"""Beginning of the names of the folders of engines. Short, because a path of a socket has 107 bytes at most."""
_FOLDER = "VLLM_RPC_BASE_PATH"
"""Variable of vLLM: folder of the sockets between the processes of an engine."""
_MEMORY = Path("/dev/shm")
_QUEUE = "psm_"
_NAMES = re.compile(rf"{_MEMORY}/({_QUEUE}\w+|vllm_dist_\S+)$", re.MULTILINE)
"""Names of shared memory: Python's, for queues of vLLM, and vLLM's, for sums over processes on CPU."""


def make_engine_folder() -> None:
    """Give the engine of this process a folder of its own. Call the function before the construction of the engine."""
    os.environ[_FOLDER] = str(owned_folder(ENGINE_FOLDERS))


@contextmanager
def meeting_in_engine_folder() -> Iterator[None]:
    """Let vLLM choose a file in the folder of the engine as the meeting point of the engine's processes."""
    before, tempfile.tempdir = tempfile.tempdir, os.environ.get(_FOLDER, tempfile.tempdir)
    try:
        yield
    finally:
        tempfile.tempdir = before


def remove_names_of_shared_memory() -> None:
    """Remove the names of the shared memory of this process and its children, which must have opened the memory."""
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        # The executor watches for processes that end.
        with suppress(OSError):
            for name in set(_NAMES.findall(Path(f"/proc/{process.pid}/maps").read_text())):
                _remove_name(name)


def _remove_name(name: str) -> None:
    # Another process has the same memory, so the name may be gone.
    with suppress(FileNotFoundError):
        (_MEMORY / name).unlink()
        if name.startswith(_QUEUE):
            resource_tracker.unregister(f"/{name}", "shared_memory")


def use_nameless_lock_of_progress_bars() -> None:
    """Give progress bars the lock of a thread. By default a bar makes a semaphore with a name for all processes."""
    from tqdm import tqdm

    tqdm.set_lock(RLock())
