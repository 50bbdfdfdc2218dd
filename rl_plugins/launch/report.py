"""What a finished run can say of itself: its learning curve as a picture, and its figures as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """Read a run's `metrics.jsonl`."""
    series = read_metrics(folder.metrics)
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


def plot_learning_curve(folders: Sequence[RunFolder], path: Path) -> None:
    """Validation reward (and training reward, pale) over the steps of one run or of several in a row."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    start = 0
    for position, folder in enumerate(folders):
        series, colour = read_metrics(folder.metrics), f"C{position}"
        train, validation = series.get("train/reward", {}), series.get("val/reward", {})
        if train:
            axes.plot([start + step for step in train], list(train.values()), colour, alpha=0.25, linewidth=1)
        label = f"{folder.path.name}: greedy, held out"
        axes.plot([start + step for step in validation], list(validation.values()), colour, marker="o", label=label)
        last = start + max([*train, *validation, *series.get("train/loss", {}), 0])
        if position + 1 < len(folders):
            axes.axvline(last, color="grey", linewidth=0.8, linestyle=":")
        start = last
    axes.set(xlabel="step", ylabel="reward", ylim=(-0.02, 1.02), title="Learning curve (pale: training samples)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
