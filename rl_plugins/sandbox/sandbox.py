"""The sandbox for programs of the policy: `CodeSandbox`, and the choice of the way to isolate.

    auto          namespaces, or else bubblewrap
    namespaces    Linux namespaces
    bwrap         bubblewrap
    https://...   a server
    [docker, run, -i, --rm, IMAGE]    the command of a container
    none          no isolation

A machine without any isolation is refused. Programs run without isolation only if `none` is written out.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rl_plugins.config.settings import AT_LEAST_1, check_ranges
from rl_plugins.errors import ConfigError
from rl_plugins.python_file import nearest
from rl_plugins.sandbox.external import RemoteSandbox, bubblewrap, container, unprotected
from rl_plugins.sandbox.namespaces import Namespaces
from rl_plugins.sandbox.records import Backend, SandboxError, SandboxJob, SandboxLimits, SandboxResult

logger = logging.getLogger(__name__)

_DEFAULT = SandboxLimits()
_PATIENT = SandboxLimits(cpu_s=30, wall_s=60)
"""Limits of the first program, also on a busy machine."""
_LEAST_S = 1e-3
_WAY_OUT = (
    "allow user namespaces, install bubblewrap, or set sandbox to the address of a server, or to the command of a "
    "container (docs/code.md)"
)


class CodeSandbox:
    """Sandbox for programs: limits, no network, and nothing of the machine to read but Python and the system.

    Threads may call `run` at once. The sandbox ends with the process.

    Example:
        with rl.CodeSandbox(limits={"cpu_s": 2}) as sandbox:
            result = sandbox.run("print(int(input()) * 2)", stdin="21")
            assert result.ok and result.stdout == "42\\n"

    Args:
        sandbox: `auto`, `namespaces`, `bwrap`, `none`, the address of a server, or the words of a command.
        limits: limits of each program: a SandboxLimits, or a mapping with some of its fields.
        interpreter: command before the name of the program's file, such as `[node]`; None is Python.
        file_name: name of the program's file.
        folders: further folders for programs to read, for `namespaces` and `bwrap`.
        headers: headers of the requests to a server.
        parallel: largest number of programs at once; None is the number of CPUs.

    Attributes:
        limits: limits of each program.
        parallel: largest number of programs at once.

    Raises:
        ConfigError: an option is wrong, or there is no such sandbox on this machine.
    """

    def __init__(
        self,
        sandbox: str | Sequence[str] = "auto",
        *,
        limits: SandboxLimits | Mapping[str, float] | None = None,
        interpreter: Sequence[str] | None = None,
        file_name: str = "main.py",
        folders: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        parallel: int | None = None,
    ) -> None:
        self.limits = _limits_of(limits or {})
        if parallel is not None:
            check_ranges(int, AT_LEAST_1, parallel=parallel)
        if isinstance(interpreter, str) or (interpreter is not None and not interpreter):
            raise ConfigError(f"interpreter={interpreter!r}: give the words of a command as a list, such as [node]")
        if not file_name or "/" in file_name or file_name in (".", ".."):
            raise ConfigError(f"file_name={file_name!r}: must be the name of a file without a folder")
        self._interpreter = None if interpreter is None else tuple(map(str, interpreter))
        self._file_name = file_name
        self.parallel = parallel or len(os.sched_getaffinity(0))
        self._places = threading.BoundedSemaphore(self.parallel)
        self._backend = _backend_of(sandbox, list(folders), headers or {})
        if self._interpreter is not None or self.limits != _DEFAULT:
            self._try_options()

    def run(
        self,
        program: str,
        stdin: str = "",
        *,
        limits: SandboxLimits | Mapping[str, float] | None = None,
        within_s: float | None = None,
    ) -> SandboxResult:
        """Run a program.

        Args:
            program: text of the program.
            stdin: standard input.
            limits: limits of this program that differ from the limits of the sandbox.
            within_s: seconds for the program and for the wait until fewer than `parallel` programs run; None waits
                without end.

        Raises:
            SandboxError: the sandbox failed. There is no outcome, also no bad one.
        """
        own = self.limits if limits is None else _limits_of(limits, self.limits)
        start = time.monotonic()
        if not self._places.acquire(timeout=within_s):
            raise SandboxError(f"the program did not start within {within_s:g} s: other programs ran all the time")
        try:
            if within_s is not None:
                left_s = max(within_s - (time.monotonic() - start), _LEAST_S)
                own = replace(own, wall_s=min(own.wall_s, left_s))
            return self._backend.run(SandboxJob(program, stdin, own, self._interpreter, self._file_name))
        finally:
            self._places.release()

    def _try_options(self) -> None:
        """Run an empty program with the interpreter and the limits, but with much time.

        Raises:
            ConfigError: the interpreter does not start, or Python does not end well under the limits.
        """
        limits = replace(self.limits, cpu_s=_PATIENT.cpu_s, wall_s=_PATIENT.wall_s)
        name = "limits" if self._interpreter is None else f"interpreter={list(self._interpreter)}"
        try:
            result = self._backend.run(SandboxJob("\n", "", limits, self._interpreter, self._file_name))
            # Another interpreter may refuse an empty program.
            fault = "" if result.ok or self._interpreter is not None else f"({_last_line(result)}): raise the limit"
        except SandboxError as error:
            way_out = "" if self._interpreter is None else ": install it in a folder that programs may read"
            fault = f"({error}){way_out}"
        if fault:
            self.close()
            raise ConfigError(f"{name}: an empty program did not run {fault}")

    def close(self) -> None:
        """End the sandbox and all of its programs."""
        self._backend.close()

    def __enter__(self) -> CodeSandbox:
        """Return the sandbox."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the sandbox."""
        self.close()


def _limits_of(given: SandboxLimits | Mapping[str, float], basis: SandboxLimits = _DEFAULT) -> SandboxLimits:
    if isinstance(given, SandboxLimits):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"limits={given!r}: give a mapping, such as {{cpu_s: 2}}")
    names = [field.name for field in fields(SandboxLimits)]
    for name in given:
        if name not in names:
            raise ConfigError(f"limits: there is no limit {name!r}{nearest(str(name), names)}")
    values: dict[str, Any] = dict(given)
    return replace(basis, **values)


def _backend_of(sandbox: str | Sequence[str], folders: Sequence[str], headers: Mapping[str, str]) -> Backend:
    """Return the first working way to isolate.

    Raises:
        ConfigError: the sandbox has no such name, or does not work on this machine.
    """
    if not isinstance(sandbox, str):
        if not isinstance(sandbox, Sequence) or not sandbox:
            raise ConfigError(f"sandbox={sandbox!r}: {_choices()}")
        return _tried(container(sandbox), f"sandbox={list(sandbox)!r}", "run the command by hand, and correct it")
    if sandbox.startswith(("http://", "https://")):
        return _tried(RemoteSandbox(sandbox, headers), f"sandbox={sandbox}", "start the server, or correct the address")
    if sandbox == "none":
        logger.warning("sandbox=none: programs of the policy run without protection, as your user")
        return _tried(unprotected(), "sandbox=none", _WAY_OUT)
    makers: dict[str, Callable[[], Backend]] = {
        "namespaces": lambda: Namespaces(folders),
        "bwrap": lambda: bubblewrap(folders),
    }
    if sandbox != "auto" and sandbox not in makers:
        raise ConfigError(f"sandbox={sandbox!r}: {_choices()}")
    reasons = []
    for name in [sandbox] if sandbox in makers else list(makers):
        try:
            backend = makers[name]()
            _try_program(backend)
            return backend
        except SandboxError as error:
            reasons.append(f"{name}: {error}")
    raise ConfigError(
        f"sandbox={sandbox}: this machine cannot isolate programs of the policy ({'; '.join(reasons)}): {_WAY_OUT}"
    )


def _choices() -> str:
    return (
        "use auto, namespaces, bwrap, none, the address of a server such as https://sandbox.example.org/run, or the "
        "words of a command such as [docker, run, -i, --rm, --network=none, python:3.12]"
    )


def _tried(backend: Backend, name: str, way_out: str) -> Backend:
    try:
        _try_program(backend)
    except SandboxError as error:
        raise ConfigError(f"{name}: a first program did not run ({error}): {way_out}") from None
    return backend


def _try_program(backend: Backend) -> None:
    """Run a first program.

    Raises:
        SandboxError: the sandbox does not work.
    """
    try:
        result = backend.run(SandboxJob("print(input())", "ready", _PATIENT, None, "main.py"))
    except SandboxError:
        backend.close()
        raise
    if not result.ok or result.stdout != "ready\n":
        backend.close()
        raise SandboxError(f"a program that prints its input failed: {_last_line(result)}")


def _last_line(result: SandboxResult) -> str:
    return (result.stderr.strip().splitlines() or [f"exit status {result.exit_status} {result.limit}".strip()])[-1]
