"""The folder of a run: where its parts are, and which checkpoint is the newest.

A checkpoint folder has its name only when it is complete: it is written under another name and then renamed.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CHECKPOINT = re.compile(r"checkpoint_(\d{8})$")
_UNFINISHED = re.compile(r"\.(checkpoint|best)_\d{8}\.(partial|removed)$")
_BEST = re.compile(r"best_\d{8}$")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def metrics(self) -> Path:
        """One JSON object a line: `step`, `time`, and the metrics of that step."""
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def pipeline(self) -> Path:
        """The resolved configuration, if the folder is that of a pipeline: its stages have folders in it."""
        return self.path / "pipeline.yaml"

    @property
    def environment(self) -> Path:
        """The versions of everything that was installed when the run was started."""
        return self.path / "environment.txt"

    @property
    def git_state(self) -> Path:
        """The commit that the run was started from, and which files differed from it."""
        return self.path / "git.json"

    @property
    def git_diff(self) -> Path:
        """How they differed."""
        return self.path / "git.diff"

    @property
    def resumes(self) -> Path:
        """A line for each time the run went on from a checkpoint: what was restored and what was not."""
        return self.path / "resumes.txt"

    @property
    def failures(self) -> Path:
        """What ended training workers that were started again: a line that begins with `[`, and tracebacks."""
        return self.path / "failures.txt"

    def add_failure(self, line: str, details: str) -> None:
        """Write down that training workers have failed and start again."""
        with self.failures.open("a", encoding="utf-8") as file:
            file.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {line}\n{details}\n\n")

    def times_failed(self) -> int:
        """How often training workers were started again."""
        lines = self.failures.read_text(encoding="utf-8").splitlines() if self.failures.is_file() else []
        return sum(line.startswith("[20") for line in lines)

    @property
    def samples(self) -> Path:
        """Tables of validation samples, one file per validation."""
        return self.path / "samples"

    def sample_files(self) -> list[Path]:
        """The tables, oldest first."""
        return sorted(self.samples.glob("step_*.json"))

    @property
    def rollouts(self) -> Path:
        """What the newest steps have sampled, if it is kept."""
        return self.path / "rollouts"

    @property
    def export(self) -> Path:
        """The policy as a Hugging Face folder."""
        return self.path / "policy"

    def exported(self) -> Path | None:
        """The model that the run has exported, if it is through."""
        return next((path for path in (self.export, self.path / "reward_model") if path.is_dir()), None)

    @property
    def tracking_run(self) -> Path:
        """Holds the id of the MLflow run."""
        return self.path / "mlflow_run_id"

    @property
    def curves(self) -> Path:
        """The main metrics as one picture."""
        return self.path / "curves.png"

    @property
    def stop(self) -> Path:
        """Asks the run to save and end after the step that runs, if somebody makes it."""
        return self.path / "stop"

    @property
    def stopped(self) -> Path:
        """Says after which step and why the run has ended before its last one."""
        return self.path / "stopped.txt"

    @property
    def curve(self) -> Path:
        """The learning curve."""
        return self.path / "learning_curve.png"

    @property
    def changes(self) -> Path:
        """What the configuration changes of its recipe."""
        return self.path / "changes.yaml"

    @property
    def error(self) -> Path:
        """The error that has ended the run, if one did."""
        return self.path / "error.txt"

    @property
    def report(self) -> Path:
        """The run on one page."""
        return self.path / "report.html"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` steps."""
        return self.path / f"checkpoint_{step:08d}"

    def best(self, step: int) -> Path:
        """The checkpoint after `step` steps, if it is kept as one of the best."""
        return self.path / f"best_{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return self._named(_CHECKPOINT)

    def bests(self) -> list[Path]:
        """The best checkpoints, oldest first."""
        return self._named(_BEST)

    def unfinished(self) -> list[Path]:
        """Checkpoints that are half written or half removed."""
        return self._named(_UNFINISHED)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        # From the beginning: a dot before the name marks what is not complete, or no longer.
        return sorted(path for path in self.path.iterdir() if pattern.match(path.name)) if self.path.is_dir() else []

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        checkpoints = self.checkpoints()
        return checkpoints[-1] if checkpoints else None

    def times_resumed(self) -> int:
        """How often the run went on from a checkpoint."""
        return len(self.resumes.read_text(encoding="utf-8").splitlines()) if self.resumes.is_file() else 0

    def places(self) -> dict[str, Path]:
        """What somebody may look for and there is, under the name that it has for a reader."""
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
    """The step at which a checkpoint folder was made, from its name."""
    match = _CHECKPOINT.search(path.name)
    if match is None:
        raise ValueError(f"{path} is not a checkpoint folder")
    return int(match.group(1))


def append_metrics(path: Path, metrics: Mapping[str, float], step: int | None) -> None:
    """Add a line to a `metrics.jsonl`, in place of one that a killed process did not write to its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    row = json.dumps({"step": step, "time": round(time.time(), 3), **metrics})
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        if file.read() not in (b"", b"\n"):
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
        file.write(f"{row}\n".encode())


def metric_rows(path: Path) -> list[dict[str, float]]:
    """The lines of a `metrics.jsonl`, without one that is not written to its end; a file that is not there has none."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()]


def read_metrics(path: Path, *, finite: bool = True) -> dict[str, dict[int, float]]:
    """Each metric of a `metrics.jsonl` as step to value, in the order of the steps.

    A repeated step counts once, the later one; a line that was not written to its end does not count.

    Args:
        path: of the file; one that is not there has no metrics.
        finite: leave out values that are no finite numbers.
    """
    series: dict[str, dict[int, float]] = {}
    for row in metric_rows(path):
        step, _ = int(row.pop("step")), row.pop("time", None)
        for name, value in row.items():
            if math.isfinite(value) or not finite:
                series.setdefault(name, {})[step] = value
    return {name: dict(sorted(points.items())) for name, points in series.items()}
