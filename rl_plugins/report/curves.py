"""Which curves of a run stand together in one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

Series = Mapping[str, Mapping[int, float]]

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
"""Title of a picture to the metrics in it."""

ELSEWHERE = ("time/*", "memory/*", "val/time/*", "val/memory/*", "train/reward_*", "system/*")
"""Metrics that have no curve of their own: phases and failures have sections, machines belong to MLflow."""


def main_curves(series: Series) -> dict[str, Series]:
    """The pictures of `MAIN` that the run has something for."""
    pictures = {title: _matching(series, patterns) for title, patterns in MAIN.items()}
    return {title: curves for title, curves in pictures.items() if curves}


def other_curves(series: Series) -> dict[str, Series]:
    """A picture of each metric that has a place nowhere else."""
    placed = {name for curves in main_curves(series).values() for name in curves}
    placed |= set(_matching(series, ELSEWHERE))
    return {name: {name: points} for name, points in series.items() if name not in placed}


def _matching(series: Series, patterns: Sequence[str]) -> Series:
    return {name: series[name] for pattern in patterns for name in series if fnmatch(name, pattern)}
