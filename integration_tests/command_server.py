"""Commands in forks of one process, which has only imported the libraries with long imports.

A command of this project imports torch, transformers, Lightning and MLflow before its work, and the imports take longer
than the work of most tests. A fork of the server has all of the imports. The fork gets the arguments, folder,
environment, streams and signals of a new interpreter, and its own session. The server does not import Ray, vLLM or
DeepSpeed, because a test checks that a run of one process never loads the three.

A fork differs from a new interpreter in two points. `ENVIRONMENT` sets the number of OpenMP threads: OpenMP reads
the number at its import. Options of the interpreter, such as `-W`, have no effect.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from rl_plugins.tests.patience import patient

ROOT = Path(__file__).parent.parent
IMPORTED = (
    "hydra.main", "lightning.pytorch", "matplotlib.figure", "mlflow", "mlflow.store.tracking.sqlalchemy_store", "peft",
    "pyarrow.parquet", "torch", "transformers", "rl_plugins.commands.export", "rl_plugins.commands.main",
    "rl_plugins.launch.pipeline", "rl_plugins.launch.preflight", "rl_plugins.launch.local",
    "rl_plugins.models.tiny", "rl_plugins.rewards.inline",
    "rl_plugins.rollout.transformers_engine", "rl_plugins.strategies.single_device",
)  # fmt: skip
# Variables that libraries read at their import.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    # The allocator of PyArrow would start a thread.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class ForkedCommand:
    """A command started by the server, with the methods of `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], reports: IO[str]) -> None:
        self.args, self._reports = args, reports
        line = reports.readline()
        assert line, "the command server has ended: see its traceback"
        self.pid = int(line)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the command runs."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status."""
        if (status := self._status(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], timeout)[0]:
            line = self._reports.readline()
            assert line, f"the command server ended before {self.args}"
            self.returncode = int(line)
            self._reports.close()
        return self.returncode


def start_command(
    args: Sequence[str],
    *,
    cwd: Path,
    stdout: IO[Any],
    stderr: IO[Any],
    stdin: IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> ForkedCommand:
    """Start `python -m MODULE ...`, `python -c CODE ...` or `python FILE ...` in a fork of the server.

    Args:
        args: command, which begins with `sys.executable`.
        cwd: current folder of the command.
        stdout: file.
        stderr: file, which may be the same as for stdout.
        stdin: file; empty by default.
        env: environment, by default the environment of this process.
    """
    assert args[0] == sys.executable, args
    server = _server()
    reads, writes = os.pipe()
    with tempfile.TemporaryFile("w+") as request, open(os.devnull) as nothing:
        json.dump({"args": list(args[1:]), "cwd": str(cwd), "env": dict(os.environ if env is None else env)}, request)
        request.seek(0)
        streams = [file.fileno() for file in (stdin or nothing, stdout, stderr)]
        socket.send_fds(server, [b"c"], [request.fileno(), writes, *streams])
    os.close(writes)
    return ForkedCommand(args, os.fdopen(reads))


def run_command(
    args: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    input: str = "",
    timeout_s: float = 240,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command as `subprocess.run(args, capture_output=True, text=True)` does, in a fork of the server."""
    with (
        tempfile.TemporaryFile("w+") as typed,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        typed.write(input)
        typed.seek(0)
        command = start_command(args, cwd=cwd, env=env, stdin=typed, stdout=out, stderr=err)
        try:
            status = command.wait(patient(timeout_s))
        finally:
            command.kill()
        for file in (out, err):
            file.seek(0)
        result = subprocess.CompletedProcess(args, status, out.read(), err.read())
    if check:
        assert status == 0, f"{args} ended with {status}\n{result.stdout[-3000:]}\n{result.stderr[-5000:]}"
    return result


@cache
def _server() -> socket.socket:
    """Start the server, which ends with this process."""
    here, there = socket.socketpair()
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", "integration_tests.command_server", str(there.fileno())],
            cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], env=environment, start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every request. Return the request in a child; return None in the server after its client has gone."""
    running: dict[int, tuple[int, int]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == control.fileno():
                    message, files, *_ = socket.recv_fds(control, 1, 5)
                    if not message:
                        for pid, _ in running.values():
                            with suppress(ProcessLookupError):
                                os.killpg(pid, signal.SIGKILL)
                        return None
                    if (pid := os.fork()) == 0:
                        for handle, (_, reports) in running.items():
                            os.close(handle)
                            os.close(reports)
                        os.close(files[1])
                        control.close()
                        return _request(files[0], files[2:])
                    os.write(files[1], f"{pid}\n".encode())
                    running[handle := os.pidfd_open(pid)] = pid, files[1]
                    selector.register(handle, selectors.EVENT_READ)
                    for file in (files[0], *files[2:]):
                        os.close(file)
                else:
                    pid, reports = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    _report(reports, os.waitstatus_to_exitcode(status))


def take_signals() -> None:
    """Take SIGINT and SIGHUP in this process, as a command does at a terminal.

    A shell that starts the tests in the background ignores SIGINT, and nohup ignores SIGHUP. Commands inherit this.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _report(pipe: int, status: int) -> None:
    # The pipe is broken if the command's client no longer waits.
    with suppress(BrokenPipeError):
        os.write(pipe, f"{status}\n".encode())
    os.close(pipe)


def _request(file: int, streams: Sequence[int]) -> dict[str, Any]:
    """Connect this child to the streams and the session of a command; return the command."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    take_signals()
    with os.fdopen(file) as opened:
        request: dict[str, Any] = json.load(opened)
    return request


def _run(args: list[str], cwd: str, env: dict[str, str], libraries: list[str]) -> None:
    """Run the arguments as a new interpreter does."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
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


def _main() -> None:
    # The first entry is the current folder; the second, PYTHONPATH.
    libraries = sys.path[2:]
    for module in IMPORTED:
        importlib.import_module(module)
    loaded = {"ray", "vllm", "deepspeed"} & set(sys.modules)
    assert not loaded, f"{loaded} in the server"
    # The interpreter knows threads of Python, and a fork handles them. A measurement of coverage has such a thread.
    native = len(os.listdir("/proc/self/task")) - threading.active_count()
    assert native == 0, "a process in which a library has started threads must not fork"
    gc.collect()
    gc.freeze()
    if (request := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _run(**request, libraries=libraries)


if __name__ == "__main__":
    _main()
