"""Forks of `integration_tests.fork_server` behave as new interpreters, also in place of Ray's workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from integration_tests.fork_server import FORK, ForkServer
from integration_tests.worker_start.sitecustomize import SET_UP, VARIABLE, WORKER
from rl_plugins.tests.patience import patient, wait_until

START = Path(__file__).parents[3] / "integration_tests" / "worker_start"
FACTS = """
import json, os, sys
import numpy, random, torch
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "session": os.getsid(0) == os.getpid(),
    "variable": os.environ.get("OF_WORKER"), "mine": os.environ["MINE"], "niceness": os.nice(0),
    "first": sys.path[0], "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item()],
}))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A server with few imports."""
    server = ForkServer("test", ("json", "numpy", "torch"), ("ray",))
    server.start()
    yield server
    server.end()
    wait_until(lambda: not server.folder.exists(), "the end of the server without users")


class Worker:
    """An interpreter started in the way of Ray."""

    def __init__(self, folder: Path, program: str, server: str, context: Mapping[str, object] | None = None) -> None:
        """Start the interpreter with the address of a server, and with a runtime environment if a context is given."""
        workers = folder / "ray" / "_private" / "workers"
        workers.mkdir(parents=True, exist_ok=True)
        (folder / SET_UP).write_text("print('no fork')")
        (folder / WORKER).write_text(program)
        command = [str(folder / WORKER), "--option=1"]
        if context is not None:
            own = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
            command = [str(folder / SET_UP), *command, *own]
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(START), "MINE": "of Ray", VARIABLE: server},
        )  # fmt: skip

    def printed(self) -> str:
        return self.process.communicate(timeout=patient(30))[0]


def fork_of(server: ForkServer, worker: Worker) -> psutil.Process:
    """Wait for the fork that stands for a worker."""
    wait_until(lambda: server.forks_of([worker.process.pid]), "the fork")
    (pid,) = server.forks_of([worker.process.pid])
    return psutil.Process(pid)


def test_fork_has_the_state_of_a_new_worker_of_ray(server: ForkServer, tmp_path: Path) -> None:
    context = {"env_vars": {"OF_WORKER": "$MINE${ABSENT}"}}
    set_up, direct = (
        json.loads(Worker(tmp_path, FACTS, server.address, given).printed().splitlines()[-1])
        for given in (context, None)
    )
    assert (set_up["variable"], direct["variable"]) == ("of Ray", None)
    for facts in (set_up, direct):
        assert facts["arguments"] == ["--option=1"]
        assert (facts["folder"], facts["first"]) == (str(tmp_path), str(tmp_path / Path(WORKER).parent))
        assert (facts["mine"], facts["session"], facts["niceness"]) == ("of Ray", True, os.nice(0))
    assert not {*set_up["drawn"]} & {*direct["drawn"]}, "both forks have the random state of the server"


@pytest.mark.parametrize(
    "context", [{"py_executable": "/usr/bin/other"}, {"command_prefix": ["nice"]}, {"env_vars": {VARIABLE: ""}}]
)
def test_worker_with_another_interpreter_is_no_fork(
    server: ForkServer, tmp_path: Path, context: dict[str, object]
) -> None:
    assert Worker(tmp_path, FACTS, server.address, context).printed() == "no fork\n"


def test_worker_without_the_address_of_a_server_is_no_fork(tmp_path: Path) -> None:
    assert Worker(tmp_path, "print('new')", "").printed() == "new\n"


def test_worker_ends_with_the_status_of_the_fork(server: ForkServer, tmp_path: Path) -> None:
    ends = {"raise SystemExit(3)": 3, "import os; os.kill(os.getpid(), 9)": -9, "import os; os.abort()": -6, "": 0}
    for program, status in ends.items():
        worker = Worker(tmp_path, program, server.address)
        worker.printed()
        assert worker.process.returncode == status, program


def test_signals_and_the_end_of_a_worker_reach_the_fork(server: ForkServer, tmp_path: Path) -> None:
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked to end', flush=True))\n"
        "subprocess.Popen(['sleep', '1000'])\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1000)\n"
    )
    worker = Worker(tmp_path, program, server.address)
    assert worker.process.stdout is not None
    assert worker.process.stdout.readline() == "ready\n"
    fork = fork_of(server, worker)
    processes = [fork, *fork.children()]
    assert len(processes) == 2
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.stdout.readline() == "asked to end\n"
    worker.process.kill()
    worker.printed()
    assert not psutil.wait_procs(processes, timeout=patient(30))[1]
    wait_until(lambda: not server.forks_of([worker.process.pid]), "the end of the fork in the server")


def test_no_fork_outlives_a_client_with_an_early_end_or_signal(server: ForkServer, tmp_path: Path) -> None:
    for message in (b"", bytes([signal.SIGTERM])) * 20:
        with socket.socket(socket.AF_UNIX) as client, tempfile.TemporaryFile() as request, open(os.devnull) as nothing:
            client.connect(server.address)
            program = ["-c", "import time; time.sleep(1000)"]
            asked = {"args": program, "cwd": str(tmp_path), "env": {}, "niceness": 0, "stands_for": os.getpid()}
            request.write(json.dumps(asked).encode())
            request.seek(0)
            socket.send_fds(client, [FORK], [request.fileno(), *[nothing.fileno()] * 3])
            client.sendall(message)
            pid, *status = client.makefile().read().split() if message else ("0",)
        assert status == ([str(-signal.SIGTERM)] if message else []), pid
    wait_until(lambda: not server.forks_of([os.getpid()]), "the end of all forks")


def test_children_of_an_ended_worker_end(server: ForkServer, tmp_path: Path) -> None:
    program = "import subprocess\nprint(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL).pid)"
    worker = Worker(tmp_path, program, server.address)
    child = int(worker.printed())
    wait_until(lambda: not psutil.pid_exists(child), "the end of the child")
