"""Curves of a run: which metrics share a chart, and which points a chart draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from statistics import fmean, median

Points = Mapping[int, float]
"""Values of one metric by step."""
Series = Mapping[str, Points]
"""Points by the name of the metric."""

MAIN: dict[str, Sequence[str]] = {
    "Reward": ("val/reward", "train/reward"),
    "Several samples per prompt": ("val/*_at_[0-9]", "val/*_at_[0-9][0-9]"),
    "Beside the reward": ("val/rewards/*", "train/rewards/*"),
    "Accuracy": ("val/accuracy", "train/accuracy"),
    "Loss": ("val/loss", "train/loss"),
    "Loss of the critic": ("train/critic/loss",),
    "KL": ("train/kl", "train/ppo_kl"),
    "Entropy": ("train/entropy",),
    "Response length (tokens)": ("train/response_length",),
    "Turns of a conversation": ("train/turns",),
    "Truncated responses, groups of one score": ("train/truncated", "train/uniform_groups"),
    "Log-prob gap, trainer to sampler": ("train/rollout_gap", "train/rollout_gap_max"),
    "Gradient norm": ("train/gradient_norm", "train/*/gradient_norm"),
    "Clipped": ("train/clip_fraction", "train/dual_clip_fraction"),
    "Learning rate": ("train/lr", "train/*/lr"),
    "Samples per second": ("samples_per_s",),
    "Tokens per second": ("tokens_per_s",),
    "Model FLOPs utilization": ("throughput/mfu",),
    "Idle share of a step": ("idle/trainer", "idle/engine"),
    "Staleness (policies)": ("rollout/staleness", "rollout/staleness_max"),
    "Rollout engines": ("rollout/engines", "rollout/engines_lost"),
}
"""Title of a main chart to the patterns of its metrics."""

ELSEWHERE = ("time/*", "memory/*", "val/time/*", "val/memory/*", "train/reward_*", "system/*")
"""Metrics without a chart of their own: phases and failed rewards have sections, machine metrics are in MLflow."""

_LARGEST_GAP = 2.0
"""A curve breaks where the distance to the next value exceeds this multiple of the median distance."""


def main_curves(series: Series) -> dict[str, Series]:
    """Return the curves of each main chart for which the run has metrics, by the title of the chart."""
    charts = {title: _matching(series, patterns) for title, patterns in MAIN.items()}
    return {title: curves for title, curves in charts.items() if curves}


def other_curves(series: Series) -> dict[str, Series]:
    """Return a chart for each metric without a place in a main chart or in a section of the report."""
    placed = {name for curves in main_curves(series).values() for name in curves}
    placed |= set(_matching(series, ELSEWHERE))
    return {name: {name: points} for name, points in series.items() if name not in placed}


def _matching(series: Series, patterns: Sequence[str]) -> Series:
    return {name: series[name] for pattern in patterns for name in series if fnmatch(name, pattern)}


@dataclass(frozen=True)
class DrawnPoint:
    """One value, or the mean and the range of several neighbouring values."""

    step: float
    low: float
    mean: float
    high: float


def curve_segments(points: Points, max_points: int) -> list[list[DrawnPoint]]:
    """Break a curve at gaps, and thin a curve with more values than a chart can show.

    A gap is NaN, infinity, or a range of missing steps.

    Args:
        points: Value by step, in ascending order of the steps.
        max_points: Largest number of drawn points of all segments together. Each further segment may add one point.
    """
    segments = _unbroken_segments(points)
    # All segments of a curve are thinned by the same factor.
    size = max(1, math.ceil(sum(map(len, segments)) / max_points))
    return [[_drawn(part[at : at + size]) for at in range(0, len(part), size)] for part in segments]


def _unbroken_segments(points: Points) -> list[list[tuple[int, float]]]:
    distances = [after - before for before, after in pairwise(points)]
    largest = _LARGEST_GAP * median(distances) if distances else 0
    segments: list[list[tuple[int, float]]] = []
    last: int | None = None
    for step, value in points.items():
        if not math.isfinite(value):
            last = None
            continue
        if last is None or step - last > largest:
            segments.append([])
        segments[-1].append((step, value))
        last = step
    return segments


def _drawn(part: Sequence[tuple[int, float]]) -> DrawnPoint:
    values = [value for _, value in part]
    return DrawnPoint(fmean(step for step, _ in part), min(values), fmean(values), max(values))
