"""CodeSandbox: outcomes like those of `python FILE`, options, refusals, and every way to isolate."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.message import Message
from http.client import BadStatusLine, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.sandbox import external, namespaces, server
from rl_plugins.sandbox.records import SandboxError, SandboxJob, SandboxLimits, SandboxResult
from rl_plugins.sandbox.sandbox import CodeSandbox
from rl_plugins.sandbox.supervisor import write_answer
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.tests.sandbox.machine import skip_without_namespaces
from rl_plugins.tests.sandbox.test_attacks import running_below

PATIENT = {"wall_s": 60.0}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[CodeSandbox]:
    skip_without_namespaces()
    with CodeSandbox("namespaces", limits=PATIENT) as sandbox:
        yield sandbox


@for_each(
    "program",
    [
        "print(input())\nprint('ä', end='')",
        "import sys\nprint(sys.stdin.read(), sys.argv[1:], __name__, file=sys.stderr)\nsys.exit('bye')",
        "x = 1\n\nx / 0",
        "def f(:\n    pass",
        "import atexit, threading, time\natexit.register(print, 'end')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nraise SystemExit(4)",
        "import sys\nsys.setrecursionlimit(50)\ndef f(): f()\ntry: f()\nexcept RecursionError: print('deep')",
        "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))",
        "import multiprocessing\nwith multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, 2]))",
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
        "import asyncio\nasync def f(): await asyncio.sleep(0); print('async')\nasyncio.run(f())",
        "print({'a', 'b', 'c'}, hash('x'))",
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "def f(x: List[int]): pass\nprint(1)",
        "def f(x: int): pass\nprint(f.__annotations__)",
        "import locale, sys\nprint(sys.stdout.encoding, sys.flags.hash_randomization, sys.path[0] != '')",
    ],
)
def test_program_has_the_outcome_of_a_new_interpreter(sandbox: CodeSandbox, program: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(program, encoding="utf-8")
    environment = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
    command = [sys.executable, "-s", str(tmp_path / "main.py")]
    plain = subprocess.run(command, input="1 ö\n2", capture_output=True, text=True, env=environment, encoding="utf-8")
    result = sandbox.run(program, "1 ö\n2")
    assert (result.stdout, result.exit_status, result.limit) == (plain.stdout, plain.returncode, "")
    assert result.stderr.replace("/tmp/main.py", "main.py") == plain.stderr.replace(f"{tmp_path}/main.py", "main.py")


def test_run_takes_limits_of_one_program_and_reports_the_time(sandbox: CodeSandbox) -> None:
    result = sandbox.run("while True: pass", limits={"cpu_s": 0.2})
    assert result.limit == "cpu" and not result.ok and 0.1 < result.seconds < 60
    assert result.exit_status == -signal.SIGKILL
    assert sandbox.run("print(1)", limits=SandboxLimits(wall_s=60, output_kb=1)).ok
    assert sandbox.run("print('x' * 1100)", limits={"output_kb": 1}).stdout == "x" * 1024


def test_interpreter_is_another_command() -> None:
    skip_without_namespaces()
    with CodeSandbox("namespaces", interpreter=["sh"], file_name="main.sh", limits=PATIENT) as sandbox:
        result = sandbox.run("read word; echo $word; echo $0 >&2; exit 5", "hello\n")
    assert (result.stdout, result.stderr, result.exit_status) == ("hello\n", "main.sh\n", 5)


@for_each(
    ("options", "message"),
    [
        (
            {"interpreter": ["no-such-command"]},
            r"interpreter=.*: an empty program did not run \(.*no-such-command",
        ),
        ({"limits": {"memory_mb": 1}}, r"limits: an empty program did not run .*: raise the limit"),
    ],
)
def test_sandbox_tries_interpreter_and_limits_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CodeSandbox("none", **options)


def test_limits_beyond_the_numbers_of_the_kernel_are_no_limits() -> None:
    skip_without_namespaces()
    with CodeSandbox("namespaces", limits={"memory_mb": 10**13, "cpu_s": 30, "wall_s": 60}) as sandbox:
        assert sandbox.run("print(1)").stdout == "1\n"


@for_each("value", ["Bearer key\n", " Bearer key"])
def test_remote_sandbox_sends_headers_without_white_space(value: str) -> None:
    with served() as (address, handler):
        CodeSandbox(address, headers={"Authorization": value})
    assert handler.asked[-1][1] == "Bearer key"


def test_remote_sandbox_hides_a_header_with_wrong_characters() -> None:
    with pytest.raises(ConfigError, match=r"headers\.Authorization: the value has characters") as error:
        CodeSandbox("http://127.0.0.1:9", headers={"Authorization": "Bearer se\ncret"})
    assert "cret" not in str(error.value)


def test_programs_see_further_folders_read_only(tmp_path: Path) -> None:
    skip_without_namespaces()
    tmp_path.chmod(0o755)
    (tmp_path / "words").write_text("hello", encoding="utf-8")
    with CodeSandbox("namespaces", folders=[str(tmp_path)], limits=PATIENT) as sandbox:
        path = f"{tmp_path}/words"
        assert sandbox.run(f"print(open({path!r}).read())").stdout == "hello\n"
        assert "Read-only file system" in sandbox.run(f"open('{tmp_path}/new', 'w')").stderr


def test_programs_see_folders_behind_links(tmp_path: Path) -> None:
    """A link of the machine may lead to a folder that programs do not see."""
    skip_without_namespaces()
    tmp_path.chmod(0o755)
    inner = tmp_path / "hidden" / "inner"
    inner.mkdir(parents=True)
    (inner / "words").write_text("hello", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "hidden")
    (tmp_path / "inner").symlink_to("hidden/inner")
    folders = [f"{tmp_path}/link/inner", f"{tmp_path}/inner"]
    with CodeSandbox("namespaces", folders=folders, limits=PATIENT) as sandbox:
        for folder in folders:
            assert sandbox.run(f"print(open('{folder}/words').read())").stdout == "hello\n"


def test_threads_run_programs_at_once(sandbox: CodeSandbox) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda number: sandbox.run(f"print({number})").stdout, range(12))
    assert list(results) == [f"{number}\n" for number in range(12)]


def test_sandbox_starts_again_after_the_end_of_the_server() -> None:
    skip_without_namespaces()
    before = set(running_below(os.getpid()))
    with CodeSandbox("namespaces", limits=PATIENT) as sandbox:
        launcher = next(child.pid for child in psutil.Process().children() if child.pid not in before)
        os.kill(launcher, signal.SIGKILL)
        wait_until(lambda: not running_below(launcher), "the end of the server")
        assert sandbox.run("print(1)").stdout == "1\n"


def test_threads_run_the_programs_again_after_the_end_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    skip_without_namespaces()
    tmp_path.chmod(0o755)
    attempt, restarted = namespaces.Namespaces._attempt, threading.Event()

    def late_attempt(self: namespaces.Namespaces, job: SandboxJob) -> SandboxResult:
        """Let one thread see the end of the server after another thread has started the next server."""
        try:
            return attempt(self, job)
        except EOFError:
            if job.stdin == "0":
                assert restarted.wait(patient(60))
            raise

    def run(number: int) -> str:
        program = f"import os, time\nwhile not os.path.exists('{tmp_path}/end'): time.sleep(0.01)\nprint(input())"
        printed = box.run(program, str(number)).stdout
        restarted.set()
        return printed

    monkeypatch.setattr(namespaces.Namespaces, "_attempt", late_attempt)
    before = set(running_below(os.getpid()))
    with (
        CodeSandbox("namespaces", limits=PATIENT, folders=[str(tmp_path)], parallel=4) as box,
        ThreadPoolExecutor(4) as pool,
    ):
        launcher = next(child.pid for child in psutil.Process().children() if child.pid not in before)
        printed = pool.map(run, range(4))
        # A server, and three processes for each program.
        wait_until(lambda: len(running_below(launcher)) == 13, "the start of all programs")
        os.kill(launcher, signal.SIGKILL)
        (tmp_path / "end").touch()
        assert list(printed) == ["0\n", "1\n", "2\n", "3\n"]


def test_server_without_a_process_for_a_program_fails_this_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    caller, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own, channel = socket.socketpair()
    watched = os.pidfd_open(os.getpid())
    with caller, own:
        socket.send_fds(caller, [b"job"], [channel.fileno()])
        channel.close()
        caller.shutdown(socket.SHUT_WR)
        monkeypatch.setattr(server.os, "fork", fail)
        # The next message is the end of the caller.
        monkeypatch.setattr(server.os, "_exit", sys.exit)
        with connection, pytest.raises(SystemExit):
            server._accept_jobs(connection, watched, [])
        with own.makefile("rb") as file, pytest.raises(SandboxError, match="no process for the program: Resource temp"):
            namespaces.read_answer(file.read)
    os.close(watched)


@for_each("missing", [1, 4])
def test_read_answer_finds_a_cut_output(missing: int) -> None:
    channel, other = socket.socketpair()
    with channel, other:
        write_answer(other.fileno(), {"exit_status": 0}, b"out", b"err")
        whole = channel.recv(1000)
    with pytest.raises(EOFError):
        namespaces.read_answer(io.BytesIO(whole[:-missing]).read)


def test_close_ends_running_programs() -> None:
    skip_without_namespaces()
    before = set(running_below(os.getpid()))
    sandbox = CodeSandbox("namespaces", limits=PATIENT)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            sandbox.run("import time\ntime.sleep(1000)")
        except SandboxError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(set(running_below(os.getpid())) - before) >= 5, "the start of the program")
    sandbox.close()
    thread.join(60)
    wait_until(lambda: set(running_below(os.getpid())) <= before, "the end of all processes")
    assert [str(error) for error in errors] == ["the sandbox was closed"]


def test_killed_caller_takes_the_sandbox_along(tmp_path: Path) -> None:
    skip_without_namespaces()
    text = (
        "import os, threading, time\nfrom rl_plugins.sandbox.sandbox import CodeSandbox\n"
        "sandbox = CodeSandbox('namespaces')\nprint('ready', flush=True)\nsandbox.run('import time; time.sleep(1000)')"
    )
    root = str(Path(__file__).resolve().parents[3])
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    wait_until(lambda: len(running_below(process.pid)) >= 5, "the start of the program")
    processes = running_below(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not any(map(_runs, processes)), "the end of all processes")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Other ways to isolate ----------------------------------------------------------------------------------------------


@for_each("sandbox", ["none", ["env", "-i"]])
def test_command_runs_programs_with_limits(sandbox: str | list[str]) -> None:
    before = set(os.listdir("/tmp"))
    with CodeSandbox(sandbox, limits=PATIENT) as box:
        result = box.run("import sys\nprint(input())\nsys.stderr.write('e')\nsys.exit(3)", "hello")
        assert (result.stdout, result.stderr, result.exit_status, result.limit) == ("hello\n", "e", 3, "")
        assert box.run("while True: pass", limits={"cpu_s": 0.2}).limit == "cpu"
        assert box.run("while True: print(1)").limit == "output"
        daemon = box.run(
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
            "        print(os.getpid(), flush=True)\n        time.sleep(1000)\n    os._exit(0)\nos.wait()"
        )
        assert not daemon.stdout or not _runs(int(daemon.stdout))
    # Other tests have such folders for a while.
    wait_until(
        lambda: not any(name.startswith("sandbox-") for name in set(os.listdir("/tmp")) - before), "no folder is left"
    )


def test_program_that_kills_the_supervisor_has_no_outcome_and_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "import os, time\nfolder, reaper = input(), os.getppid()\n"
        "supervisor = open(f'/proc/{reaper}/stat').read().split()[3]\n"
        "with open(f'{folder}/numbers', 'w') as file: file.write(f'{os.getpid()} {reaper} {os.getcwd()}')\n"
        "os.kill(int(supervisor), 9)\nwhile not os.path.exists(f'{folder}/end'): time.sleep(0.01)"
    )
    with CodeSandbox("none", limits=PATIENT) as box, ThreadPoolExecutor(1) as pool:
        try:
            with pytest.raises(SandboxError, match="the command ended with -9"):
                pool.submit(box.run, program, str(tmp_path)).result(patient(20))
            *numbers, folder = (tmp_path / "numbers").read_text(encoding="utf-8").split()
            shutil.rmtree(folder)
            wait_until(lambda: not any(_runs(int(number)) for number in numbers), "the end of program and reaper")
        finally:
            (tmp_path / "end").touch()


def test_run_fails_if_other_programs_take_all_the_time() -> None:
    with CodeSandbox("none", limits=PATIENT, parallel=1) as box:
        with box._places, pytest.raises(SandboxError, match=r"the program did not start within 0\.01 s"):
            box.run("print(1)", within_s=0.01)
        assert box.run("print(1)", within_s=60).stdout == "1\n"


class _Server(BaseHTTPRequestHandler):
    """Server of the protocol in docs/code.md, with the answers of a test."""

    answers: list[tuple[int, Any]]
    asked: list[tuple[dict[str, Any], str | None]]

    def do_POST(self) -> None:
        """Answer with the next answer, or with the outcome of the program."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((asked, self.headers["Authorization"]))
        status, answer = self.answers.pop(0) if self.answers else (200, _run(asked))
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", asked["program"]], input=asked["stdin"], capture_output=True, text=True
    )
    status = {"exit_status": done.returncode, "limit": "", "seconds": 0.1}
    return {"stdout": done.stdout, "stderr": done.stderr, **status}


@contextmanager
def served(*answers: tuple[int, Any]) -> Iterator[tuple[str, type[_Server]]]:
    handler = type("Handler", (_Server,), {"answers": list(answers), "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/run", handler
        server.shutdown()


def test_remote_sandbox_sends_program_input_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with served((503, {}), (429, {})) as (address, handler):
        sandbox = CodeSandbox(address, headers={"Authorization": "Bearer key"}, limits={"cpu_s": 2})
        result = sandbox.run("print(int(input()) * 2)", "21")
    assert result.ok and result.stdout == "42\n"
    asked, authorization = handler.asked[-1]
    assert authorization == "Bearer key" and len(handler.asked) == 5
    assert asked["stdin"] == "21" and asked["limits"]["cpu_s"] == 2 and asked["limits"]["memory_mb"] == 512
    assert asked["interpreter"] is None and asked["file_name"] == "main.py"


@for_each(
    ("answer", "message"),
    [
        ((401, {"error": "no key"}), "status 401: .*no key"),
        ((200, b"<html>"), "the answer has no outcome"),
        ((200, {"stdout": "", "stderr": ""}), "the answer has no outcome"),
        ((200, []), "the answer has no outcome"),
        ((200, {"fault": "no memory", "stdout": "", "stderr": ""}), "no memory"),
        ((200, {"fault": "no\nmemory"}), "http.*: no memory"),
        ((200, {"stdout": "", "stderr": "", "exit_status": math.inf, "limit": "", "seconds": 1}), "no outcome"),
        ((200, {"stdout": "", "stderr": "", "exit_status": 0, "limit": "", "seconds": math.nan}), "no outcome"),
        ((200, {"stdout": "", "stderr": "", "exit_status": 0, "limit": "x", "seconds": 1}), "the unknown limit 'x'"),
    ],
)
def test_remote_sandbox_refuses_a_server_without_outcomes(answer: tuple[int, Any], message: str) -> None:
    with served(answer) as (address, _), pytest.raises(ConfigError, match=f"a first program did not run.*{message}"):
        CodeSandbox(address)


class _CutAnswer(io.BytesIO):
    """Answer of a server that ends its connection too early."""

    def read(self, size: int | None = -1) -> bytes:
        """Fail."""
        raise IncompleteRead(b"{")


def test_remote_sandbox_sends_a_request_again_after_a_cut_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"stdout": "ready\n", "stderr": "", "exit_status": 0, "limit": "", "seconds": 0.1}
    answers: list[io.BytesIO | Exception] = [
        _CutAnswer(), HTTPError("", 503, "", Message(), _CutAnswer()), io.BytesIO(json.dumps(answer).encode()),
        BadStatusLine("x"), BadStatusLine("y"), BadStatusLine("z"),
    ]  # fmt: skip

    def urlopen(request: object, timeout: float) -> io.BytesIO:
        if isinstance(given := answers.pop(0), Exception):
            raise given
        return given

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(external.urllib.request, "urlopen", urlopen)
    sandbox = CodeSandbox("http://server")
    with pytest.raises(SandboxError, match="http://server: z"):
        sandbox.run("print(1)")


# Refusals -----------------------------------------------------------------------------------------------------------


def test_machine_without_namespaces_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folders: object) -> None:
        raise SandboxError("the kernel refused: new namespaces: Operation not permitted")

    monkeypatch.setattr("rl_plugins.sandbox.sandbox.Namespaces", fail)
    monkeypatch.setattr(external.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as error:
        CodeSandbox()
    assert str(error.value) == (
        "sandbox=auto: this machine cannot isolate programs of the policy (namespaces: the kernel refused: new "
        "namespaces: Operation not permitted; bwrap: bubblewrap is not installed): allow user namespaces, install "
        "bubblewrap, or set sandbox to the address of a server, or to the command of a container (docs/code.md)"
    )


def test_namespaces_names_the_call_that_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_namespaces()
    monkeypatch.setattr(namespaces.Namespaces, "_map_users", lambda self: None)
    with pytest.raises(ConfigError, match="namespaces: the kernel refused: "):
        CodeSandbox("namespaces")


@for_each(
    ("options", "message"),
    [
        ({"sandbox": "docker"}, "sandbox='docker': use auto, namespaces, bwrap, none, the address of a server"),
        ({"sandbox": None}, "sandbox=None: use auto"),
        ({"sandbox": []}, "sandbox=\\[\\]: use auto"),
        ({"sandbox": ["no-such-command"]}, "a first program did not run .no-such-command: No such file"),
        ({"sandbox": ["false"]}, "a first program did not run .false: the command ended with 1"),
        ({"sandbox": "http://127.0.0.1:9"}, "a first program did not run .* start the server, or correct the address"),
        ({"limits": {"cpu": 2}}, "limits: there is no limit 'cpu'; did you mean 'cpu_s'"),
        ({"limits": {"cpu_s": 0}}, "cpu_s=0: must be above 0"),
        ({"limits": {"processes": 1.5}}, "processes=1.5: must be a whole number"),
        ({"limits": 3}, "limits=3: give a mapping"),
        ({"parallel": 0}, "parallel=0: must be at least 1"),
        ({"interpreter": "node"}, "interpreter='node': give the words of a command as a list"),
        ({"interpreter": []}, "interpreter=\\[\\]: give the words"),
        ({"file_name": "../x"}, "file_name='../x': must be the name of a file without a folder"),
        ({"folders": ["data"]}, "folders: 'data' is no existing absolute path"),
        ({"folders": [str(Path.home())]}, "which holds the home folder"),
    ],
)
def test_code_sandbox_refuses_wrong_options(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ConfigError, match=message):
        CodeSandbox(**options)
