"""Forks of one process, which has only imported libraries with long imports, in place of new interpreters.

A process of this project imports torch, transformers, Lightning and more before its work, and the imports take longer
than the work of most tests. A fork of a server has all of the imports. The fork gets the arguments, folder,
environment, streams and signals of a new interpreter, and its own session.

A fork differs from a new interpreter in three points. `ENVIRONMENT` sets the number of OpenMP threads: OpenMP reads
the number at its import. Options of the interpreter, such as `-W`, have no effect. The parent of a fork is the server.

All processes of a test run share a server. A connection to the server is a fork, or a process with later requests for
forks: when such a connection ends, the server kills the fork, and the server ends after its last user.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Libraries read these variables at their import.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    # The allocator of PyArrow would start a thread.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
USER, FORK = b"u", b"f"
"""First bytes of a connection."""
_FORWARDED = {signal.SIGTERM, signal.SIGINT}
"""Signals of a process to the fork in its place."""
# All processes of pytest-xdist have the same number of the test run.
_TEST_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex


class ForkServer:
    """A process with imported libraries, which forks for each request."""

    def __init__(self, name: str, imported: Sequence[str], absent: Sequence[str]) -> None:
        """Name the server.

        Args:
            name: name of the server in this test run.
            imported: modules which the server imports.
            absent: modules which the server must not import.
        """
        self._imported, self._absent = imported, absent
        # The path of a socket has at most 107 characters, and folders of temporary files can have long paths.
        self.folder = Path("/tmp") / f"forks-{name}-{_TEST_RUN}"
        self.address = str(self.folder / "socket")
        self._user: socket.socket | None = None

    def start(self) -> None:
        """Start the server, unless a process has started the server, without a wait for the imports."""
        if self._user is not None:
            return
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not Path(self.address).exists():
                self._listen()
            self._user = socket.socket(socket.AF_UNIX)
            self._user.connect(self.address)
            self._user.sendall(USER)

    def end(self) -> None:
        """End the use of the server by this process. The server ends after its last user, and removes its folder."""
        if self._user is not None:
            self._user.close()
            self._user = None

    def _listen(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(1024)
            subprocess.Popen(
                [sys.executable, "-m", "integration_tests.fork_server", str(listener.fileno()),
                 ",".join(self._imported), ",".join(self._absent)],
                cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()], start_new_session=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    def forks_of(self, pids: Iterable[int]) -> list[int]:
        """Return the numbers of the living forks in place of processes, see `worker_start/sitecustomize.py`."""
        found = []
        for pid in pids:
            with suppress(FileNotFoundError):
                found.append(int(os.readlink(self.folder / f"{pid}.fork")))
        return found


def take_signals() -> None:
    """Take SIGINT and SIGHUP in this process, as a command does at a terminal.

    A shell that starts the tests in the background ignores SIGINT, and nohup ignores SIGHUP. Commands inherit this.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# The server -------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A fork, seen by the server."""

    pid: int
    handle: int
    client: socket.socket
    link: Path | None

    def kill(self) -> None:
        """Kill the fork and its group. The server has not waited for the fork, so no other group has this number."""
        # The fork has no group of its own yet, or has ended.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.handle)
        self.client.close()


class _Server:
    """The loop of the server."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._folder = Path(listener.getsockname()).parent
        self._users: list[socket.socket] = []
        self._running: list[_Running] = []
        self._request: dict[str, Any] | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> dict[str, Any] | None:
        """Fork for every request. Return the request in a fork; return None in the server after its last user."""
        had_user = False
        while self._users or not had_user:
            for key, _ in self._selector.select():
                act: Callable[[], None] = key.data
                act()
                if self._request is not None:
                    return self._request
            had_user = had_user or bool(self._users)
        for fork in self._running:
            fork.kill()
        shutil.rmtree(self._folder)
        return None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        kind, files, *_ = socket.recv_fds(connection, 1, 4)
        if kind == USER:
            self._users.append(connection)
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._end_user(connection))
        elif kind == FORK:
            self._fork(connection, files)
        else:
            # The client ended before its request.
            connection.close()

    def _end_user(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._users.remove(connection)
        connection.close()

    def _fork(self, client: socket.socket, files: list[int]) -> None:
        with os.fdopen(files[0]) as opened:
            request = json.load(opened)
        stands_for = request.pop("stands_for", None)
        # A fork takes signals after its start as a group: the server kills groups.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        if (pid := os.fork()) == 0:
            self._become(files[1:], client)
            self._request = request
            return
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        for file in files[1:]:
            os.close(file)
        link = None if stands_for is None else self._folder / f"{stands_for}.fork"
        if link is not None:
            link.unlink(missing_ok=True)
            link.symlink_to(str(pid))
        fork = _Running(pid, os.pidfd_open(pid), client, link)
        self._running.append(fork)
        self._selector.register(fork.handle, selectors.EVENT_READ, lambda: self._report(fork))
        self._selector.register(client, selectors.EVENT_READ, lambda: self._signal(fork))
        with suppress(BrokenPipeError):
            client.sendall(f"{pid}\n".encode())

    def _become(self, streams: Sequence[int], client: socket.socket) -> None:
        """Close the files of the server in a fork, and connect the fork to the streams and a session of its own."""
        self._selector.close()
        self._listener.close()
        client.close()
        for user in self._users:
            user.close()
        for fork in self._running:
            fork.close()
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        take_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)

    def _signal(self, fork: _Running) -> None:
        """Send the signals of the client to a fork; kill the fork and the processes of its group after its client."""
        if fork not in self._running:
            return
        try:
            numbers = fork.client.recv(64)
        except ConnectionResetError:
            numbers = b""
        if not numbers:
            self._selector.unregister(fork.client)
            fork.kill()
        for number in numbers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fork.handle, signal.Signals(number))

    def _report(self, fork: _Running) -> None:
        """Tell the client the exit status of a fork."""
        if fork.link is not None:
            # Ray kills the process group of a worker after the worker.
            fork.kill()
        _, status = os.waitpid(fork.pid, 0)
        self._selector.unregister(fork.handle)
        with suppress(KeyError):
            self._selector.unregister(fork.client)
        self._running.remove(fork)
        if fork.link is not None:
            fork.link.unlink(missing_ok=True)
        with suppress(BrokenPipeError):
            fork.client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        fork.close()


def _run(args: list[str], cwd: str, env: dict[str, str], libraries: list[str], niceness: int) -> None:
    """Run the arguments as a new interpreter does."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    os.nice(max(0, niceness - os.nice(0)))
    _new_random_states()
    kind = args[0]
    first = {"-m": cwd, "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *libraries]
    importlib.invalidate_caches()
    if kind == "-m":
        sys.argv[:] = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = ["-c", *args[2:]]
        exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = args
        runpy.run_path(kind, run_name="__main__")


def _new_random_states() -> None:
    """Draw random states anew: all forks have the states of the server."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _main() -> None:
    # The first entry is the current folder; the second, PYTHONPATH.
    libraries = sys.path[2:]
    file, imported, absent = sys.argv[1:]
    for module in imported.split(","):
        importlib.import_module(module)
    loaded = {*absent.split(",")} & set(sys.modules)
    assert not loaded, f"{loaded} in the server"
    # The interpreter knows threads of Python, and a fork handles them. A measurement of coverage has such a thread.
    native = len(os.listdir("/proc/self/task")) - threading.active_count()
    assert native == 0, "a process in which a library has started threads must not fork"
    gc.collect()
    gc.freeze()
    if (request := _Server(socket.socket(fileno=int(file))).serve()) is not None:
        _run(**request, libraries=libraries)


if __name__ == "__main__":
    _main()
