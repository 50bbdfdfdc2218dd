"""Each end of a command has one line and one of the statuses in docs/commands.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import ControllerError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from rl_plugins.errors import ConfigError, RayLost, RunStopped, TrainingDiverged
from rl_plugins.launch.command_line import exit_on_user_error
from rl_plugins.launch.worker_errors import user_errors_unwrapped
from rl_plugins.tests.patience import patient
from rl_plugins.user_code import exits_refused

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"
REPEAT = "To continue, repeat the command with run.resume=auto"


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@exits_refused()
def exit_early() -> None:
    sys.exit(0)


ENDS: list[tuple[Callable[[], None], int, str]] = [
    (lambda: None, 0, ""),
    (raising(ConfigError("run.steps=0")), 2, "error: run.steps=0"),
    (raising(TrainingDiverged("by step 3")), 2, "error: by step 3"),
    (exit_early, 2, "error: code of the user (a reward, a data set) called sys.exit(0), and the command"),
    (raising(RayLost("Ray ended")), 69, f"error: Ray ended. {REPEAT}"),
    (raising(RunStopped("grpo: stopped after step 3: SIGTERM")), 75, f"after step 3: SIGTERM. {REPEAT}"),
    (send(signal.SIGHUP), 129, "interrupted by SIGHUP"),
    (send(signal.SIGINT), 130, "interrupted by SIGINT"),
    (send(signal.SIGTERM), 143, "interrupted by SIGTERM"),
]


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("run", "status", "line"), ENDS, ids=[f"{status}-{line[:12]}" for _, status, line in ENDS])
def test_exit_on_user_error_gives_a_line_and_a_status(
    run: Callable[[], None], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    try:
        exit_on_user_error(run)
        ended = 0
    except SystemExit as end:
        ended = int(str(end.code))
    said = capsys.readouterr()
    assert ended == status and line in said.out + said.err and (said.out + said.err).count("\n") == bool(line)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before


def test_page_of_commands_lists_every_exit_status() -> None:
    listed = re.findall(r"^\| ([\d, ]+) \|", PAGE.read_text(), re.M)
    assert {int(number) for row in listed for number in row.split(",")} == {1, *(status for _, status, _ in ENDS)}


def test_exit_on_user_error_ends_a_stopped_ray_job_as_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "raysubmit_1"}}')
    with pytest.raises(SystemExit) as end:
        exit_on_user_error(raising(RunStopped("stopped after step 3")))
    assert end.value.code == 0


def test_second_signal_ends_the_process_at_once_with_one_line() -> None:
    program = (
        "import os, signal\n"
        "from rl_plugins.launch.command_line import exit_on_user_error\n"
        "def run():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "exit_on_user_error(run)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60),
        # A shell that started the tests in the background ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (130, "SIGINT again: ended at once\n")


def test_exits_refused_refuses_the_status_of_success_in_this_process_alone() -> None:
    program = (
        "import os\n"
        "from rl_plugins.user_code import exits_refused\n"
        "with exits_refused():\n"
        "    if os.fork() == 0:\n"
        "        os._exit(0)\n"
        "    print(os.wait()[1])\n"
        "    try:\n"
        "        os._exit(0)\n"
        "    except Exception as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patient(60))
    said = "code of the user (a reward, a data set) called os._exit(0), and the command is not finished"
    assert (ended.returncode, ended.stdout) == (3, f"0\n{said}: remove the call\n")


def test_exits_refused_gives_the_call_back_at_the_end() -> None:
    before = os._exit
    with exits_refused():
        assert os._exit is not before
    assert os._exit is before


def test_user_errors_unwrapped_names_the_end_of_ray() -> None:
    with pytest.raises(RayLost, match=r"^Ray ended during the run: RayActorError: "), user_errors_unwrapped():
        raise RayActorError
    with pytest.raises(RayLost, match=r"too little memory, so Ray killed .*: 4 worker"), user_errors_unwrapped():
        raise OutOfMemoryError("4 worker(s) were killed\n")
    with pytest.raises(ControllerError), user_errors_unwrapped():
        raise ControllerError(ValueError("not an error of the user"))
    message = r"no room for the training workers in time.*placement\.wait_for_nodes_s"
    with pytest.raises(RayLost, match=message), user_errors_unwrapped():
        raise ControllerError(WorkerGroupStartupTimeoutError(2))
