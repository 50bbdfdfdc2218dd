"""External sandboxes: the command of a container, bubblewrap, or a server with HTTP."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import IO, get_args

from rl_plugins.control_characters import without_controls
from rl_plugins.errors import ConfigError
from rl_plugins.json_text import read_foreign_json
from rl_plugins.sandbox import supervisor
from rl_plugins.sandbox.namespaces import (
    GRACE_S,
    START_S,
    environment_of_programs,
    job_bytes,
    read_answer,
    visible_folders,
)
from rl_plugins.sandbox.records import Limit, SandboxError, SandboxJob, SandboxLimits, SandboxResult, result_of
from rl_plugins.sandbox.seccomp import filter_text, has_filter

_END_S = 5.0
_ATTEMPTS = 3
_SHOWN = 500
"""Characters of a server's fault in an error."""
_MIB = 2**20


class CommandSandbox:
    """A process for each program: a command in front of `python3`, such as `docker run -i --rm IMAGE`.

    Args:
        prefix: function from the limits of a program to the words of the command.
        python: Python of the supervisor, and of programs.
        environment: environment of the command; None is the environment of this process.
        with_filter: give the command the filter of system calls, as `--seccomp` and a descriptor.
        own_processes: True if the supervisor sees all processes of its user; see `supervisor`.
    """

    def __init__(
        self,
        prefix: Callable[[SandboxLimits], Sequence[str]],
        python: str,
        environment: Mapping[str, str] | None = None,
        with_filter: bool = False,
        own_processes: bool = False,
    ) -> None:
        self._prefix, self._python, self._environment = prefix, python, environment
        self._with_filter = with_filter
        text = Path(supervisor.__file__).read_text(encoding="utf-8")
        self._supervisor = ["-I", "-c", text, *([supervisor.OWN_PROCESSES] if own_processes else [])]

    def run(self, job: SandboxJob) -> SandboxResult:
        """Run a program.

        Raises:
            SandboxError: the command failed.
        """
        prefix = list(self._prefix(job.limits))
        name = prefix[0] if prefix else self._python
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as calls:
            descriptors = []
            if self._with_filter:
                calls.write(filter_text())
                calls.seek(0)
                descriptors = [calls.fileno()]
                prefix[1:1] = ["--seccomp", str(calls.fileno())]
            try:
                process = subprocess.Popen(
                    [*prefix, self._python, *self._supervisor],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"{name}: {error.strerror}") from None
            return _outcome(process, job, name, errors)

    def close(self) -> None:
        """Do nothing: no process outlives its program."""


def _outcome(process: subprocess.Popen[bytes], job: SandboxJob, name: str, errors: IO[bytes]) -> SandboxResult:
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(START_S + job.limits.wall_s + GRACE_S, process.kill)
    timer.daemon = True
    timer.start()
    try:
        process.stdin.write(job_bytes(job))
        process.stdin.flush()
        return read_answer(process.stdout.read)
    except (EOFError, OSError):
        process.wait()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"the command ended with {process.returncode}"
        raise SandboxError(f"{name}: {reason}") from None
    finally:
        timer.cancel()
        # The end of its input ends a supervisor in a container, which a killed client would leave behind.
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def container(command: Sequence[str]) -> CommandSandbox:
    """Return a sandbox over the command of a container."""
    words = [str(word) for word in command]
    return CommandSandbox(lambda limits: words, "python3")


def unprotected() -> CommandSandbox:
    """Return no sandbox: programs run as the user of this process, with limits only."""
    return CommandSandbox(lambda limits: [], sys.executable, environment_of_programs(), own_processes=True)


def bubblewrap(folders: Sequence[str]) -> CommandSandbox:
    """Return a sandbox over bubblewrap.

    Args:
        folders: further folders for programs to read.

    Raises:
        SandboxError: bubblewrap is not installed, or this process is root.
    """
    command = shutil.which("bwrap")
    if command is None:
        raise SandboxError("bubblewrap is not installed")
    if os.geteuid() == 0 or not has_filter():
        raise SandboxError("bubblewrap does not protect this machine from programs of root")
    visible = visible_folders(folders)

    def prefix(limits: SandboxLimits) -> list[str]:
        words = [command, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        words += ["--uid", "1000", "--gid", "1000", "--proc", "/proc", "--dev", "/dev"]
        # A shared mapping of the real /dev/zero is memory that no limit counts. Reads of /dev/full give zeros, too.
        words += ["--dev-bind", "/dev/full", "/dev/zero", "--remount-ro", "/dev"]
        words += ["--size", str(limits.disk_mb * _MIB), "--tmpfs", "/tmp"]
        for path in visible:
            if os.path.exists(path):
                words += ["--ro-bind", os.path.realpath(path), path]
        for name, value in environment_of_programs().items():
            words += ["--setenv", name, value]
        return [*words, "--remount-ro", "/", "--chdir", "/tmp", "--"]

    return CommandSandbox(prefix, sys.executable, with_filter=True, own_processes=True)


class RemoteSandbox:
    """Sandbox of a server: a POST of JSON for each program (docs/code.md has the protocol).

    Args:
        address: address of the server.
        headers: headers of each request, such as Authorization.

    Raises:
        ConfigError: the value of a header has characters that no header may have. The message hides the value.
    """

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self._address = address
        # A secret in a file often ends with a line end.
        given = {name: str(value).strip() for name, value in headers.items()}
        for name, value in given.items():
            if not (value.isascii() and value.isprintable()):
                raise ConfigError(f"headers.{name}: the value has characters that no header may have: correct it")
        self._headers = {"Content-Type": "application/json", **given}

    def run(self, job: SandboxJob) -> SandboxResult:
        """Run a program. A request without an answer, or with the status 429 or 503, is sent again.

        Raises:
            SandboxError: the server did not answer, or answered with an error.
        """
        content = json.dumps({**job.plain(), "stdin": job.stdin}).encode()
        request = urllib.request.Request(self._address, content, self._headers)
        reason = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(2.0**attempt / 4)
            try:
                with urllib.request.urlopen(request, timeout=job.limits.wall_s + GRACE_S) as response:
                    return self._result(response.read())
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}: {_fault_of(error)}"
                if error.code not in (429, 503):
                    break
            except (OSError, HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise SandboxError(f"{self._address}: {' '.join(reason.split())}")

    def _result(self, content: bytes) -> SandboxResult:
        try:
            result = result_of(read_foreign_json(content))
        except SandboxError as error:
            reason = without_controls(" ".join(str(error).split()))
            raise SandboxError(f"{self._address}: {reason[:_SHOWN]}") from None
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise SandboxError(
                f"{self._address}: the answer has no outcome ({type(error).__name__}: {error})"
            ) from None
        if result.limit not in get_args(Limit):
            raise SandboxError(f"{self._address}: the answer has the unknown limit {result.limit!r}")
        return result

    def close(self) -> None:
        """Do nothing: there is no connection to close."""


def _fault_of(error: urllib.error.HTTPError) -> str:
    """Return the first characters of a server's fault; nothing if the connection ended before."""
    try:
        return error.read(_SHOWN).decode(errors="replace")
    except (OSError, HTTPException):
        return ""
