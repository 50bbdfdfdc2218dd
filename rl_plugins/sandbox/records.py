"""Records of a sandbox: limits of a program, and the outcome of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Protocol

from rl_plugins.config.settings import AT_LEAST_1, SECONDS, Settings

Limit = Literal["", "cpu", "wall", "memory", "output", "processes"]
"""Limit that ended a program; empty if the program ended by itself."""


class SandboxError(RuntimeError):
    """A failure of a sandbox, not of the program: there is no outcome."""


@dataclass(frozen=True)
class SandboxLimits(Settings):
    """Limits of one program and all of its processes.

    Attributes:
        cpu_s: CPU time of all processes together, in seconds.
        wall_s: seconds from the start of the program to its end.
        memory_mb: memory of all processes together, in MiB, without the files in /tmp.
        disk_mb: size of /tmp, in MiB. /tmp is in memory.
        file_mb: size of one file, in MiB.
        processes: number of processes and threads.
        open_files: number of open files of a process.
        output_kb: size of the standard output, and of the standard error, in KiB.
    """

    cpu_s: Annotated[float, SECONDS] = 5.0
    wall_s: Annotated[float, SECONDS] = 10.0
    memory_mb: Annotated[int, AT_LEAST_1] = 512
    disk_mb: Annotated[int, AT_LEAST_1] = 64
    file_mb: Annotated[int, AT_LEAST_1] = 64
    processes: Annotated[int, AT_LEAST_1] = 32
    open_files: Annotated[int, AT_LEAST_1] = 64
    output_kb: Annotated[int, AT_LEAST_1] = 1024


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a program.

    Attributes:
        stdout: standard output; bytes outside UTF-8 are replaced.
        stderr: standard error.
        exit_status: exit status, or the negative number of the signal that ended the program.
        limit: limit that ended the program; empty if the program ended by itself.
        seconds: seconds from start to end.
    """

    stdout: str
    stderr: str
    exit_status: int
    limit: Limit
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the program ended by itself with the exit status 0."""
        return self.exit_status == 0 and not self.limit


@dataclass(frozen=True)
class SandboxJob:
    """One program to run.

    Attributes:
        program: text of the program.
        stdin: standard input.
        limits: limits of the program.
        interpreter: command before the name of the program's file; None is Python.
        file_name: name of the program's file in /tmp.
    """

    program: str
    stdin: str
    limits: SandboxLimits
    interpreter: tuple[str, ...] | None
    file_name: str

    def plain(self) -> dict[str, Any]:
        """Return the job without the standard input as values of JSON."""
        limits = {field.name: getattr(self.limits, field.name) for field in fields(self.limits)}
        return {
            "program": self.program,
            "interpreter": None if self.interpreter is None else list(self.interpreter),
            "file_name": self.file_name,
            "limits": limits,
        }


class Backend(Protocol):
    """Way to run programs in isolation."""

    def run(self, job: SandboxJob) -> SandboxResult:
        """Run a program. Threads may call this method at once.

        Raises:
            SandboxError: the sandbox failed.
        """
        ...

    def close(self) -> None:
        """End the sandbox and all of its programs."""
        ...


def result_of(answer: Mapping[str, Any]) -> SandboxResult:
    """Return the outcome in an answer: `fault`, or the attributes of a `SandboxResult`.

    Raises:
        SandboxError: the answer is the description of a fault.
        KeyError: the answer lacks an attribute.
        TypeError: the answer is no mapping, or an attribute has another type.
        ValueError: a number of the answer is infinite or no number.
    """
    if "fault" in answer:
        raise SandboxError(str(answer["fault"]))
    seconds = float(answer["seconds"])
    if not math.isfinite(seconds):
        raise ValueError(f"the duration is {seconds} s")
    outputs = str(answer["stdout"]), str(answer["stderr"])
    return SandboxResult(*outputs, int(answer["exit_status"]), answer["limit"], seconds)
