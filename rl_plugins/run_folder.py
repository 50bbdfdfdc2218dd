"""Paths in the folder of a run, and its metrics file.

A checkpoint folder is written under a temporary name and renamed when the checkpoint is complete.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rl_plugins.redaction import redacted
from rl_plugins.whole_file import append_text, storage_errors

_CHECKPOINT = re.compile(r"checkpoint_(\d{8})$")
_UNFINISHED = re.compile(r"\.(checkpoint|best)_\d{8}\.(partial|removed)$")
_BEST = re.compile(r"best_(\d{8})$")


class _Part:
    """Path of a file or a folder in the folder of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, init=False)
class RunFolder:
    """Paths of one run.

    Attributes:
        path: path of the folder.
    """

    path: Path

    metrics = _Part("metrics.jsonl")
    """File with one JSON object per line: `step`, `time`, and the metrics of the step."""
    config = _Part("config.yaml")
    """File with the resolved configuration."""
    pipeline = _Part("pipeline.yaml")
    """File with the resolved configuration of a pipeline. The stages of a pipeline have subfolders."""
    installed_packages = _Part("environment.txt")
    """File with the versions of all installed packages at the start."""
    pinned_versions = _Part("versions.json")
    """File with the commit of each name on the Hugging Face hub, and the fixed URI of each model in MLflow."""
    git_state = _Part("git.json")
    """File with the git commit at the start, and the names of changed files."""
    git_diff = _Part("git.diff")
    """File with the changes to the git commit at the start."""
    resumes = _Part("resumes.txt")
    """File with a line for each resume: the restored states and the reset states."""
    failures = _Part("failures.txt")
    """File with the errors of restarted training workers: lines with `[` and the time, each above a traceback."""
    samples = _Part("samples")
    """Folder with a table of samples for each validation."""
    rollouts = _Part("rollouts")
    """Folder with the samples of the newest steps (`debug.dump_rollouts`)."""
    export = _Part("policy")
    """Hugging Face folder of the policy."""
    tracking_run = _Part("mlflow_run_id")
    """File with the id of the MLflow run."""
    curves = _Part("curves.png")
    """Picture of the main metrics."""
    stop = _Part("stop")
    """Request to save and stop after the current step, made by creating this file."""
    stopped = _Part("stopped.txt")
    """File with the step and the reason of a stop before the last step."""
    finished = _Part("finished.json")
    """File with the last step and the goal of the run, written when training and export have ended."""
    changes = _Part("changes.yaml")
    """File with the options set differently from the recipe."""
    lock = _Part(".lock")
    """File with the lock of the run's process."""
    linked = _Part(".linked")
    """Folder with second names of the files that are being copied to storage."""
    error = _Part("error.txt")
    """File with the error of a failed run."""
    report = _Part("report.html")
    """Page with the report of the run."""

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))

    def add_failure(self, line: str, details: str) -> None:
        """Append a failure of training workers, without secrets, before the workers start again.

        Raises:
            StorageError: the file cannot be written.
        """
        append_text(self.failures, redacted(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {line}\n{details}\n\n"))

    def worker_restarts(self) -> int:
        """Return the number of restarts of training workers."""
        lines = self.failures.read_bytes().splitlines() if self.failures.is_file() else []
        return sum(line.startswith(b"[20") for line in lines)

    def sample_files(self) -> list[Path]:
        """Return the tables of samples, oldest first."""
        return sorted(self.samples.glob(f"step_{'[0-9]' * 8}.json"))

    def exported(self) -> Path | None:
        """Return the folder of the exported model; None before the export."""
        return next((path for path in (self.export, self.path / "reward_model") if path.is_dir()), None)

    def failed(self) -> bool:
        """Return True if an error ended the run before the run was finished or stopped."""
        return self.error.is_file() and not (self.finished.is_file() or self.stopped.is_file())

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` steps."""
        return self.path / f"checkpoint_{step:08d}"

    def best(self, step: int) -> Path:
        """Return the folder of a best checkpoint after `step` steps."""
        return self.path / f"best_{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return self._named(_CHECKPOINT)

    def bests(self) -> list[Path]:
        """Return the best checkpoints, oldest first."""
        return self._named(_BEST)

    def has_content(self) -> bool:
        """Return True if the folder has a file or a folder that is not hidden."""
        return self.path.is_dir() and any(not path.name.startswith(".") for path in self.path.iterdir())

    def has_results(self) -> bool:
        """Return True if the run has metrics, a checkpoint or an exported model. A failed start leaves none."""
        has_metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return has_metrics or bool(self.checkpoints() or self.bests()) or self.exported() is not None

    def unfinished(self) -> list[Path]:
        """Return the folders of partly written or partly removed checkpoints."""
        return self._named(_UNFINISHED)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        # `match` starts at the first character: the names of incomplete folders begin with a dot.
        return sorted(path for path in self.path.iterdir() if pattern.match(path.name)) if self.path.is_dir() else []

    def aside(self, checkpoint: Path) -> Path:
        """Return a free name for a damaged checkpoint, which is kept for its owner to look at."""
        names = (f"damaged_{number}_{checkpoint.name}" for number in count(1))
        return next(path for name in names if not (path := self.path / name).exists())

    def latest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint."""
        checkpoints = self.checkpoints()
        return checkpoints[-1] if checkpoints else None

    def times_resumed(self) -> int:
        """Return the number of resumes."""
        return len(self.resumes.read_bytes().splitlines()) if self.resumes.is_file() else 0

    def places(self) -> dict[str, Path]:
        """Return the existing results of the run, by a name for the reader."""
        known = {
            "configuration": self.config,
            "metrics": self.metrics,
            "samples": self.samples,
            "report": self.report,
            "last checkpoint": self.latest_checkpoint(),
            "exported model": self.exported(),
            "resumes": self.resumes,
            "failures of workers": self.failures,
        }
        return {name: path for name, path in known.items() if path is not None and path.exists()}


def checkpoint_step(path: Path) -> int:
    """Return the step in the name of a checkpoint folder.

    Raises:
        ValueError: the folder is no checkpoint folder.
    """
    match = _CHECKPOINT.search(path.name) or _BEST.search(path.name)
    if match is None:
        raise ValueError(f"{path} is not a checkpoint folder")
    return int(match.group(1))


def append_metrics(path: Path, metrics: Mapping[str, float], step: int | None) -> None:
    """Append a line to a `metrics.jsonl`. After a torn line (a killed process, a full disk) the line is a new one.

    Raises:
        StorageError: the file cannot be written.
    """
    row = json.dumps({"step": step, "time": round(time.time(), 3), **metrics})
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(max(0, file.tell() - 1))
            start = "" if file.read() in (b"", b"\n") else "\n"
            file.write(f"{start}{row}\n".encode())


def parse_row(line: bytes) -> dict[str, float] | None:
    """Return the values of a line of a `metrics.jsonl`; None for a damaged line."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    numbers = isinstance(row, dict) and all(isinstance(value, int | float) for value in row.values())
    return row if numbers and isinstance(row.get("step"), int) and math.isfinite(row.get("time", 0)) else None


def metric_rows(path: Path) -> list[dict[str, float]]:
    """Return the complete lines of a `metrics.jsonl` without damaged lines; none if the file does not exist."""
    return [row for line in _complete_lines(path) if (row := parse_row(line)) is not None]


def count_damaged_lines(path: Path) -> int:
    """Return the number of damaged complete lines of a `metrics.jsonl`."""
    return sum(parse_row(line) is None for line in _complete_lines(path))


def _complete_lines(path: Path) -> list[bytes]:
    content = path.read_bytes() if path.is_file() else b""
    return [line for line in content.rpartition(b"\n")[0].split(b"\n") if line.strip()]


def read_metrics(path: Path, *, finite: bool = True) -> dict[str, dict[int, float]]:
    """Return the values of each metric of a `metrics.jsonl` by step, in the order of the steps.

    For a repeated step the later value counts. Damaged lines and an incomplete last line are left out.

    Args:
        path: path of the file; a missing file has no metrics.
        finite: leave out infinite values and NaN.
    """
    series: dict[str, dict[int, float]] = {}
    for row in metric_rows(path):
        step, _ = int(row.pop("step")), row.pop("time", None)
        for name, value in row.items():
            if math.isfinite(value) or not finite:
                series.setdefault(name, {})[step] = value
    return {name: dict(sorted(points.items())) for name, points in series.items()}


def reached_target(metrics: Path, step: int, target: float) -> bool:
    """Return True if the validation after a step has reached the target of `run.target_reward`.

    Args:
        metrics: path of a `metrics.jsonl`.
        step: step of the validation.
        target: reward to reach.
    """
    reward = read_metrics(metrics).get("val/reward", {}).get(step, -math.inf)
    # A mean of sums of weights may be 0.9999999999999999.
    return reward >= target or math.isclose(reward, target)
