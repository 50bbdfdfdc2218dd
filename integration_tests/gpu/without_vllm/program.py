"""Sections of the program, and their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from integration_tests.gpu.without_vllm.results import FAILED, Result, append, read

_PACKAGE = "integration_tests.gpu.without_vllm"
_LOG_CHARACTERS = 4000


@dataclass(frozen=True)
class Section:
    """Cases that run in one process.

    Attributes:
        function: path of the function of type `Cases`.
        deadline_s: longest duration of the process in seconds.
    """

    function: str
    deadline_s: float


SECTIONS = {
    "environment": Section(f"{_PACKAGE}.environment.cases", 120),
    "single_device": Section(f"{_PACKAGE}.strategies.single_device", 180),
    "zero1": Section(f"{_PACKAGE}.strategies.zero1", 300),
    "zero2": Section(f"{_PACKAGE}.strategies.zero2", 300),
    "zero3": Section(f"{_PACKAGE}.strategies.zero3", 300),
    "fsdp": Section(f"{_PACKAGE}.strategies.fsdp", 300),
    "sequence_parallel": Section(f"{_PACKAGE}.sequence_parallel.cases", 300),
    "host_memory": Section(f"{_PACKAGE}.host_memory.cases", 120),
    "packed_attention": Section(f"{_PACKAGE}.packed_attention.cases", 120),
    "output_head": Section(f"{_PACKAGE}.output_head.cases", 120),
    "liger": Section(f"{_PACKAGE}.liger.cases", 180),
    "adamw": Section(f"{_PACKAGE}.adamw.cases", 120),
    "cuda_ipc": Section(f"{_PACKAGE}.cuda_ipc.cases", 180),
}


def run_section(name: str, section: Section, device: str, output: Path) -> list[Result]:
    """Run a section in a process, and return its results. The results are appended to `output`.

    A process that fails or passes its deadline is a failed case `process`, with the end of the process's output.
    """
    before, start = len(read(output)), time.perf_counter()
    command = [sys.executable, "-u", "-m", f"{_PACKAGE}.section_process", name, section.function, device, str(output)]
    with tempfile.TemporaryFile() as log:
        status = run_process(command, log, section.deadline_s)
        log.seek(0)
        printed = log.read().decode(errors="replace")[-_LOG_CHARACTERS:]
    if status != 0:
        late = f"the process did not end within {section.deadline_s:g} s"
        message = f"{printed}\n{late if status is None else f'the process ended with status {status}'}"
        append(output, Result(name, "process", FAILED, time.perf_counter() - start, message=message))
    return read(output)[before:]


def run_process(
    command: Sequence[str], output: IO[Any], deadline_s: float, environment: Mapping[str, str] | None = None
) -> int | None:
    """Run a process; return the exit status, or None after the deadline. Kill all processes that the process has left.

    Args:
        command: program and arguments.
        output: file for both outputs of the process.
        deadline_s: longest duration in seconds.
        environment: environment of the process; None for the environment of this process.
    """
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Processes that the process has started belong to the group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
