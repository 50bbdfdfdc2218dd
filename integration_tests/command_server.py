"""Commands in forks of one process, which has only imported the libraries with long imports.

The server does not import Ray, vLLM or DeepSpeed: a test refuses the three in a run of one process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from integration_tests.fork_server import FORK, ForkServer
from rl_plugins.tests.patience import patient

SERVER = ForkServer(
    "commands",
    (
        "hydra.main", "lightning.pytorch", "matplotlib.figure", "mlflow", "mlflow.store.tracking.sqlalchemy_store",
        "peft", "pyarrow.parquet", "torch", "transformers", "rl_plugins.commands.export", "rl_plugins.commands.main",
        "rl_plugins.launch.pipeline", "rl_plugins.launch.preflight", "rl_plugins.launch.local",
        "rl_plugins.models.tiny", "rl_plugins.rewards.inline", "rl_plugins.rollout.transformers_engine",
        "rl_plugins.strategies.single_device",
    ),
    ("ray", "vllm", "deepspeed"),
)  # fmt: skip


class ForkedCommand:
    """A command started by the server, with the methods of `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], connection: socket.socket) -> None:
        self.args, self._connection = args, connection
        self._reports = connection.makefile()
        line = self._reports.readline()
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
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            line = self._reports.readline()
            assert line, f"the command server ended before {self.args}"
            self.returncode = int(line)
            self._reports.close()
            self._connection.close()
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

    The command ends with its `ForkedCommand`.

    Args:
        args: command, which begins with `sys.executable`.
        cwd: current folder of the command.
        stdout: file.
        stderr: file, which may be the same as for stdout.
        stdin: file; empty by default.
        env: environment, by default the environment of this process.
    """
    assert args[0] == sys.executable, args
    SERVER.start()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(SERVER.address)
    with tempfile.TemporaryFile("w+") as request, open(os.devnull) as nothing:
        environment = dict(os.environ if env is None else env)
        json.dump({"args": list(args[1:]), "cwd": str(cwd), "env": environment, "niceness": os.nice(0)}, request)
        request.seek(0)
        streams = [file.fileno() for file in (stdin or nothing, stdout, stderr)]
        socket.send_fds(connection, [FORK], [request.fileno(), *streams])
    return ForkedCommand(args, connection)


def run_command(
    args: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    input: str = "",
    timeout_s: float = 600,
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
