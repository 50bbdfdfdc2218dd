"""A run beyond its deadline ends with an error, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import grpo_step, runs, schedule, start_up
from benchmarks.resident import ResidentWatch
from rl_plugins.tests.patience import is_running, patient, wait_until

# One child has a process group of its own, as some processes of Ray.
SLEEPING = """#!/bin/sh
sleep 1000 &
echo $! >> "$0.ids"
setsid sleep 1000 &
echo $! >> "$0.ids"
wait
"""


def run_and_kill(folder: Path) -> None:
    schedule._run_and_kill(folder, at_step=1)


def run_alternative(folder: Path) -> None:
    grpo_step.run_alternative(["module"], [])


@pytest.mark.parametrize("measure", [runs.run_grpo, start_up.follow_start, run_and_kill, run_alternative])
def test_run_beyond_the_deadline_fails_and_leaves_no_process(
    measure: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / measure.__name__
    interpreter.write_text(SLEEPING)
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    for module in (runs, start_up, schedule, grpo_step):
        monkeypatch.setattr(module, "TIMEOUT_S", patient(1.5))
    with pytest.raises((RuntimeError, subprocess.TimeoutExpired)):
        measure(tmp_path)
    ids = [int(line) for line in interpreter.with_suffix(".ids").read_text().splitlines()]
    assert len(ids) == 2
    wait_until(lambda: not any(map(is_running, ids)), "the end of the processes")


def test_watches_of_memory_measure_the_processes_of_a_run() -> None:
    code = "import sys; sys.stdin.read()  # RayTrainWorker"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        with runs.MemoryWatch(os.getpid()) as memory, ResidentWatch(os.getpid()) as resident:
            key = ("RayTrainWorker", process.pid)
            wait_until(lambda: memory.peaks and key in resident.resident.seen, "both measurements")
        # A program of its own has some megabytes.
        assert memory.peaks["RayTrainWorker"] > 2**20
        assert resident.resident.peak("RayTrainWorker", 0, time.time(), shared=True) > 2**20
