"""Sections of the program, and their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    before, start, fault = len(read(output)), time.perf_counter(), ""
    command = [sys.executable, "-u", "-m", f"{_PACKAGE}.section_process", name, section.function, device, str(output)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if status := process.wait(section.deadline_s):
                fault = f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            fault = f"the process did not end within {section.deadline_s:g} s"
        finally:
            # Processes that the section has started belong to the group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        printed = log.read().decode(errors="replace")[-_LOG_CHARACTERS:]
    if fault:
        message = f"{printed}\n{fault}"
        append(output, Result(name, "process", FAILED, time.perf_counter() - start, message=message))
    return read(output)[before:]
