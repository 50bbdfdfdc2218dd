"""The figures of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from rl_plugins.run_folder import RunFolder, read_metrics

Series = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class RunSummary:
    """Figures of one run.

    Attributes:
        before: validation reward before the first step.
        after: validation reward after the last one.
        samples_per_s: median over steps; 0 for stages that do not sample.
        step_s: median seconds of a step.
        phases_s: median seconds of each phase that a step usually has.
        gap_max: largest trainer/sampler log-prob gap.
    """

    before: float
    after: float
    samples_per_s: float
    step_s: float
    phases_s: dict[str, float]
    gap_max: float


def summarize(folder: RunFolder) -> RunSummary:
    """The figures of a run's `metrics.jsonl`."""
    return summary_of(read_metrics(folder.metrics))


def summary_of(series: Series) -> RunSummary:
    """The same of metrics that have been read."""
    validation = list(series.get("val/reward", {}).values()) or [float("nan")]
    return RunSummary(
        before=validation[0],
        after=validation[-1],
        samples_per_s=_median(series, "samples_per_s"),
        step_s=_median(series, "time/step"),
        phases_s={
            name.removeprefix("time/"): _median(series, name)
            for name in series
            if name.startswith("time/") and name != "time/step" and _median(series, name) >= 0.001
        },
        gap_max=max(series.get("train/rollout_gap_max", {0: 0.0}).values()),
    )


def _median(series: Series, name: str) -> float:
    values = list(series.get(name, {}).values())
    return median(values) if values else 0.0
