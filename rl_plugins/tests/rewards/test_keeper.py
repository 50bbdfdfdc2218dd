"""Keepers: all programs of a process end, and exit statuses stay with the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rl_plugins.rewards.child_process import ChildProcess
from rl_plugins.tests.patience import is_running, patient, wait_until

MODULE = "rl_plugins.tests.rewards.kept_process"
PARENT = f"""
import os, time
from rl_plugins.rewards.child_process import ChildProcess
process = ChildProcess({MODULE!r}, dict(os.environ))
for order in ("session", "daemon"):
    process.connection.send((order, None))
    print(process.connection.recv(), flush=True)
time.sleep(1e6)
"""

BRIEF = """
import os, signal
from rl_plugins.rewards import keeper
from rl_plugins.sandbox import supervisor
supervisor.usage_of = lambda _: os._exit(9)
parent = os.getpid()
for handler in (signal.SIG_DFL, signal.SIG_IGN, print) * 20:
    number = os.fork()
    if not number:
        signal.signal(signal.SIGCHLD, handler)
        keeper.go_on_under_keeper(parent)
        os._exit(3 if signal.getsignal(signal.SIGCHLD) == handler else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 3
"""
FOREIGN = """
import os, subprocess
from rl_plugins.rewards import keeper
parent = os.getpid()
number = os.fork()
if not number:
    kill = os.kill
    def refusing(number, signal):
        if number == programs[1].pid:
            raise PermissionError
        kill(number, signal)
    os.kill = refusing
    programs = [subprocess.Popen(["sleep", "1000000"], stdout=subprocess.DEVNULL) for _ in range(3)]
    print(*(program.pid for program in programs), flush=True)
    keeper.go_on_under_keeper(parent)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)
"""


@pytest.fixture
def process() -> Iterator[ChildProcess]:
    started = ChildProcess(MODULE, dict(os.environ))
    yield started
    started.kill()


def ask(process: ChildProcess, order: str, argument: object = None) -> Any:
    process.connection.send((order, argument))
    assert process.connection.poll(patient(60)), f"no answer to {order}"
    return process.connection.recv()


def programs_of(process: ChildProcess) -> list[int]:
    programs = [ask(process, "session"), ask(process, "daemon")]
    assert all(map(is_running, programs))
    return programs


def test_kill_ends_programs_in_sessions_of_their_own(process: ChildProcess) -> None:
    programs = programs_of(process)
    process.kill()
    assert not any(map(is_running, programs))


@pytest.mark.parametrize(
    ("order", "argument", "described"),
    [
        ("exit", 3, "ended with exit status 3"),
        ("exit", 0, "ended with exit status 0"),
        ("raise", signal.SIGKILL, "was ended by the signal SIGKILL"),
        ("raise", signal.SIGTERM, "was ended by the signal SIGTERM"),
    ],
)
def test_end_of_the_process_ends_programs_and_is_described(
    process: ChildProcess, order: str, argument: int, described: str
) -> None:
    programs = programs_of(process)
    process.connection.send((order, argument))
    wait_until(process.has_ended, "the end of the keeper")
    assert process.describe_end() == described and not any(map(is_running, programs))


def test_killed_parent_ends_programs_in_sessions_of_their_own() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    programs = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(is_running, programs))
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(map(is_running, programs)), "the end of the programs")


def test_killed_keeper_ends_the_process(process: ChildProcess) -> None:
    assert ask(process, "status", 0) == 0
    (kept,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(kept.pid), "the end of the process")
    assert process.describe_end() == "was ended by the signal SIGKILL"


def test_ended_daemon_is_collected_and_exit_statuses_stay_with_the_process(process: ChildProcess) -> None:
    daemon = ask(process, "daemon")
    assert ask(process, "stop", daemon) == "gone"
    assert [ask(process, "status", number) for number in (0, 7)] == [0, 7]


def test_keeper_of_a_process_that_ends_at_once_ends_and_looks_at_no_other_process() -> None:
    subprocess.run([sys.executable, "-c", BRIEF], timeout=patient(60), check=True)


def test_programs_of_another_user_are_left_and_the_keeper_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FOREIGN], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    programs = list(map(int, parent.stdout.readline().split()))
    try:
        output, _ = parent.communicate(timeout=patient(60))
        assert (output, [*map(is_running, programs)]) == ("3\n", [False, True, False])
    finally:
        parent.kill()
        for program in filter(is_running, programs):
            os.kill(program, signal.SIGKILL)
