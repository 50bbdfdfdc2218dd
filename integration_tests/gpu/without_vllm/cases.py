"""Cases of a section: functions that return figures, skip or fail."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from integration_tests.gpu.without_vllm.results import FAILED, PASSED, SKIPPED, Result


class Skipped(Exception):
    """The machine lacks a part that a case needs. The message names the part."""


@dataclass(frozen=True)
class Place:
    """Place of a section.

    Attributes:
        device: `cuda` or `cpu`. On a CPU, sizes are tiny.
        folder: empty folder for files.
    """

    device: str
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """True on a GPU."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Case:
    """Case of a section.

    Attributes:
        name: name in the table.
        run: function that returns figures. It raises `Skipped`, or any other error to fail.
    """

    name: str
    run: Callable[[], Mapping[str, Any]]


Cases = Callable[[Place], Iterable[Case]]


def run_case(section: str, case: Case) -> Result:
    """Run a case, and return its result."""
    start = time.perf_counter()
    figures: Mapping[str, Any] = {}
    status, message = PASSED, ""
    try:
        figures = case.run()
    except Skipped as reason:
        status, message = SKIPPED, str(reason)
    except Exception:
        # The other cases of the section still run.
        status, message = FAILED, traceback.format_exc()
    return Result(section, case.name, status, time.perf_counter() - start, figures, message)


def need(library: str, purpose: str) -> None:
    """Skip the case on a machine without a library.

    Raises:
        Skipped: the library is not installed.
    """
    if find_spec(library) is None:
        raise Skipped(f"{library} is not installed, and {purpose} needs it")


def seconds_of(place: Place, function: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of a function, with all work of the GPU. The first call is not counted."""
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        function()
        wait_for_gpu(place)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def wait_for_gpu(place: Place) -> None:
    """Wait until the GPU has done all work."""
    import torch

    if place.on_gpu:
        torch.cuda.synchronize()
