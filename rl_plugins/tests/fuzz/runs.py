"""Runs of all targets, with a bound of inputs or of time, in one or several processes."""

from __future__ import annotations

import math
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from rl_plugins.tests.fuzz.policy_input import policy_targets
from rl_plugins.tests.fuzz.target import Report, Target
from rl_plugins.tests.fuzz.user_input import user_targets

_STEP = 50


@cache
def targets(folder: Path) -> Mapping[str, Target]:
    """Return all targets by name.

    Args:
        folder: existing folder for files.
    """
    return {**user_targets(folder), **policy_targets()}


def fuzz(
    folder: Path, *, examples: int | None = None, seconds: float = math.inf, first: int = 0, apart: int = 1
) -> dict[str, Report]:
    """Try inputs of every target, in turn, until the time is over.

    Args:
        folder: folder for files.
        examples: number of inputs of each target; None for no bound.
        seconds: largest duration.
        first: first seed of the inputs.
        apart: distance of the seeds.

    Returns:
        Report of each target by its name.
    """
    reports = {name: Report() for name in targets(folder)}
    end, number = time.monotonic() + seconds, first
    while True:
        for name, target in targets(folder).items():
            if time.monotonic() > end:
                return reports
            target.run(reports[name], _STEP if examples is None else examples, number)
        number += apart
        if examples is not None:
            return reports


def fuzz_in_processes(processes: int, seconds: float) -> dict[str, Report]:
    """Try inputs of every target in several processes, each with seeds of its own; return the reports of all."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(_fuzz_from, first, processes, seconds) for first in range(processes)]
        reports, *others = (one.result() for one in started)
    for other in others:
        for name, report in other.items():
            reports[name].counts += report.counts
            reports[name].faults = report.faults | reports[name].faults
    return reports


def _fuzz_from(first: int, apart: int, seconds: float) -> dict[str, Report]:
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(Path(folder), seconds=seconds, first=first, apart=apart)


def faults_of(reports: Mapping[str, Report]) -> list[str]:
    """Return a line for each fault."""
    return [
        f"{name}: {place}, with the input {shown}" for name, report in reports.items()
        for place, shown in report.faults.items()
    ]  # fmt: skip
