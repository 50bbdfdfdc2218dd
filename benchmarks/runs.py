"""Runs of the GRPO recipe in a separate process, with their metrics and the memory of all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.resident import Resident, ResidentWatch
from benchmarks.watch_thread import WatchThread
from rl_plugins.run_folder import metric_rows

TIMEOUT_S = 1800


@dataclass
class MeasuredRun:
    """Metrics and memory of a run.

    Attributes:
        steps: metrics of each training step.
        peak_bytes: peak memory of the largest process of each kind, in bytes.
        resident: private memory of each process over time; None if only the peaks were measured.
    """

    steps: list[dict[str, float]]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    resident: Resident | None = None

    def values(self, name: str) -> list[float]:
        """Return the values of a metric over the steps with the metric."""
        return [step[name] for step in self.steps if name in step]

    def median(self, name: str, skip: int = 2) -> float:
        """Return the median over the steps after the first `skip` steps."""
        return median(self.values(name)[skip:] or self.values(name))

    def quiet(self, name: str) -> float:
        """Return the lower quartile over the steps after the first; other work of the machine only adds to a step."""
        return quiet(self.values(name)[1:])

    def phases(self) -> dict[str, float]:
        """Return the median seconds of each phase, largest first."""
        names = {name for step in self.steps for name in step if name.startswith("time/")} - {"time/step"}
        phases = {name.removeprefix("time/"): self.median(name) for name in names}
        return dict(sorted(((k, v) for k, v in phases.items() if v >= 0.0005), key=lambda item: -item[1]))


def quiet(values: Sequence[float]) -> float:
    """Return the lower quartile."""
    return sorted(values)[(len(values) - 1) // 4]


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and end the command and all its descendants at the end of the block if the command still runs.

    Args:
        command: program and arguments.
        options: arguments of `subprocess.Popen`.
    """
    with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                # Some processes of Ray have groups of their own.
                descendants = psutil.Process(process.pid).children(recursive=True)
                os.killpg(process.pid, signal.SIGKILL)
                for descendant in descendants:
                    with suppress(psutil.NoSuchProcess):
                        descendant.kill()


def run_grpo(folder: Path, *overrides: str, name: str = "run", closely: bool = False) -> MeasuredRun:
    """Train `folder/policy` on `folder/data/train.parquet` with the GRPO recipe, in `folder/outputs/name`.

    Args:
        folder: folder with the policy and the data.
        overrides: options of the recipe.
        name: name of the run.
        closely: measure private memory fifty times a second. Otherwise measure proportional memory once a second.

    Raises:
        RuntimeError: the run failed. The message ends with its output.
        TimeoutExpired: the run has not ended after `TIMEOUT_S` seconds, and was ended.
    """
    command = [
        sys.executable, "-m", "rl_plugins.recipes.grpo", f"run.name={name}", f"run.output_dir={folder}/outputs",
        f"model.path={folder}/policy", f"data.train_files=[{folder}/data/train.parquet]", "run.export=false",
        "run.checkpoint_every=100000", "run.eval_every=0", "tracking.enabled=false", *overrides,
    ]  # fmt: skip
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        watch = ResidentWatch(process.pid) if closely else MemoryWatch(process.pid)
        with watch:
            output, _ = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise RuntimeError(f"the recipe ended with status {process.returncode}:\n{output[-4000:]}")
    steps = [row for row in metric_rows(folder / "outputs" / name / "metrics.jsonl") if "train/loss" in row]
    if isinstance(watch, ResidentWatch):
        return MeasuredRun(steps, resident=watch.resident)
    return MeasuredRun(steps, watch.peaks)


class MemoryWatch(WatchThread):
    """Measures the proportional memory (PSS) of the descendants of a process once a second.

    Attributes:
        peaks: peak of the largest process of each kind, in bytes.
    """

    KINDS = ("RayTrainWorker", "VLLMActor")

    def __init__(self, pid: int) -> None:
        # The kernel counts every page of a process. Measuring more often would make the steps slower.
        super().__init__(every_s=1.0)
        self._root = psutil.Process(pid)
        self.peaks: dict[str, int] = {}

    def measure(self) -> None:
        """Measure once."""
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            with suppress(psutil.Error):
                title = " ".join(process.cmdline())
                for kind in self.KINDS:
                    if kind in title:
                        self.peaks[kind] = max(self.peaks.get(kind, 0), process.memory_full_info().pss)
