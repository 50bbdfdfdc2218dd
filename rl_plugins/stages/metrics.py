"""Averages over the valid tokens and samples of all ranks, with one collective for all metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rl_plugins.algorithms.masked import GroupStatistics, group_statistics
from rl_plugins.data.curriculum import GroupResult
from rl_plugins.data.experience import Experience
from rl_plugins.evaluation.measures import Summary
from rl_plugins.rewards.records import (
    AGENT_DETAILS,
    JUDGE_DETAILS,
    SUMMED_DETAILS,
    Failure,
    Score,
    failure_counts,
)
from rl_plugins.stages.scheduled_sampler import row_of
from rl_plugins.strategies.loss_scale import LossScale

Reduce = Callable[[Tensor], Tensor]


@dataclass
class TokenMetrics:
    """Collects per-token metrics over the micro-batches of a step; nothing is synchronised until `averages`."""

    _sums: dict[str, Tensor] = field(default_factory=dict)
    _counts: dict[str, Tensor] = field(default_factory=dict)
    _maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor], mask_BT: Tensor, *, maximum: bool = False) -> None:
        """Add tensors of the mask's shape; with `maximum`, also keep the largest value."""
        valid_BT = mask_BT.bool()
        for name, values_BT in values.items():
            kept_BT = torch.where(valid_BT, values_BT.detach(), 0)
            self._increase(self._sums, name, kept_BT.sum())
            self._increase(self._counts, name, valid_BT.sum())
            if maximum:
                masked_N = values_BT.detach().masked_fill(~valid_BT, -torch.inf).flatten()
                # The maximum of an empty micro-batch is minus infinity.
                largest = torch.cat([masked_N, masked_N.new_full((1,), -torch.inf)]).max()
                self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def add_each(self, values: Mapping[str, Tensor], mask_BT: Tensor) -> None:
        """Add tensors per token [B, T] or per sample [B]; a sample counts if one of its tokens counts."""
        counted_B = mask_BT.bool().any(dim=-1)
        for name, value in values.items():
            self.add({name: value}, mask_BT if value.ndim == 2 else counted_B)

    def add_sum(self, name: str, value: Tensor) -> None:
        """Add a number to sum, not to average, over micro-batches and ranks."""
        self._increase(self._sums, name, value)

    def take_in(self, other: TokenMetrics) -> None:
        """Add the values of another collector, from any device."""
        for own, added in ((self._sums, other._sums), (self._counts, other._counts)):
            for name, value in added.items():
                self._increase(own, name, value.cpu())
        for name, largest in other._maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, largest.cpu()), largest.cpu())

    def averages(self, sum_over_ranks: Reduce, max_over_ranks: Reduce) -> dict[str, float]:
        """Return means `train/<name>` (sums for `add_sum`) and maxima `train/<name>_max`. Collective.

        A mean without a value is left out.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        local = [self._sums[name].double() for name in names]
        local += [self._counts.get(name, torch.zeros(())).double() for name in names]
        total = sum_over_ranks(torch.stack([value.cpu() for value in local])).tolist()
        metrics = {}
        for position, name in enumerate(names):
            if divisor := total[len(names) + position] if name in self._counts else 1.0:
                metrics[f"train/{name}"] = total[position] / divisor
        if self._maxima:
            largest = torch.stack([self._maxima[name].double().cpu() for name in sorted(self._maxima)])
            for name, value in zip(sorted(self._maxima), max_over_ranks(largest).tolist(), strict=True):
                if value > -torch.inf:
                    metrics[f"train/{name}_max"] = value
        return metrics

    @staticmethod
    def _increase(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
        totals[name] = totals[name] + value if name in totals else value


def mean_over_ranks(columns: Mapping[str, tuple[Tensor, Tensor]], sum_over_ranks: Reduce) -> dict[str, float]:
    """Return the mean of each `(values [B], mask [B])` over all ranks; NaN if no value counts. Collective."""
    sums = [torch.where(counted, values, 0).sum() for values, counted in columns.values()]
    counts = [counted.sum() for _, counted in columns.values()]
    total = sum_over_ranks(torch.stack([value.double() for value in sums + counts])).tolist()
    half = len(columns)
    return {name: total[i] / total[half + i] if total[half + i] else float("nan") for i, name in enumerate(columns)}


def interval_metrics(summary: Summary) -> dict[str, float]:
    """Return metrics such as `<data source>/best_at_8`, each with `_low` and `_high`, under names valid in MLflow."""
    metrics: dict[str, float] = {}
    for source, measures in summary.items():
        for measure, interval in measures.items():
            name = _plain(f"{source}/{measure.replace('@', '_at_')}")
            metrics |= {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return metrics


Details = dict[str, tuple[float, int]]
"""Sum and count of each detail: a named number that rewards return beside their score."""


def sum_details(scores: Iterable[Score], before: Details | None = None, names: Container[str] | None = None) -> Details:
    """Return the details of `scores`, all or those in `names`, added to the details `before`."""
    sums = dict(before or {})
    for score in scores:
        for name, value in score.details.items():
            if names is None or name in names:
                total, count = sums.get(name, (0.0, 0))
                sums[name] = total + value, count + 1
    return sums


def mean_details(of_ranks: Iterable[Details]) -> dict[str, float]:
    """Return `rewards/<name>`: the mean of each detail over the scores with the detail.

    The details of a judge and of agents have names without `rewards/`, and counts and costs among them are sums.
    """
    totals: Details = {}
    for sums in of_ranks:
        for name, (value, count) in sums.items():
            total, counted = totals.get(name, (0.0, 0))
            totals[name] = total + value, counted + count
    return {
        _plain(name if name.startswith((JUDGE_DETAILS, AGENT_DETAILS)) else f"rewards/{name}"): (
            total if name in SUMMED_DETAILS else total / count
        )
        for name, (total, count) in sorted(totals.items())
    }


def _plain(name: str) -> str:
    """Replace characters forbidden in MLflow's names."""
    return re.sub(r"[^\w\-. :/]", "_", name)


_FAILURES = get_args(Failure)
_STEPS_WITHOUT_SIGNAL = 5


@dataclass
class SampleMetrics:
    """Collects metrics of all samples of a step, also of samples left out by the algorithm."""

    _groups: list[tuple[Tensor, GroupStatistics]] = field(default_factory=list)
    _batches: list[dict[str, tuple[Tensor, Tensor]]] = field(default_factory=list)
    _failed: Tensor = field(default_factory=lambda: torch.zeros(len(_FAILURES), dtype=torch.float64))
    _size: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    _details: Details = field(default_factory=dict)
    _events: Counter[str] = field(default_factory=Counter)

    def add(self, experience: Experience, scores: list[Score]) -> None:
        """Add scored samples."""
        assert experience.scores is not None
        rewards_B, valid_B, everything_B = experience.scores.double(), experience.valid, torch.ones(len(scores)).bool()
        groups = group_statistics(rewards_B, experience.groups, valid_B)
        self._groups.append((experience.groups, groups))
        self._batches.append({
            "reward": (rewards_B, valid_B),
            "response_length": (experience.response_lengths.double(), everything_B),
            "truncated": (experience.truncated.double(), everything_B),
            # Groups with equal scores give no learning signal.
            "uniform_groups": ((groups.std_B == 0).double(), valid_B),
        })  # fmt: skip
        if endings := experience.columns.get("ending"):
            turns_B = torch.tensor([float(ending.turns) for ending in endings], dtype=torch.float64)
            cut_B = torch.tensor([float(ending.cut) for ending in endings], dtype=torch.float64)
            self._batches[-1] |= {"turns": (turns_B, everything_B), "observations_cut": (cut_B, everything_B)}
            for ending in endings:
                self._events.update(ending.counts)
        self._add_failures(scores)
        self._size += torch.stack([torch.tensor(len(scores)), experience.sequence_lengths.sum()])
        self._details = sum_details(scores, self._details)

    def add_greedy(self, scores: list[Score]) -> None:
        """Add the failures, counts and costs of greedy responses, which are no samples to train on."""
        self._add_failures(scores)
        self._details = sum_details(scores, self._details, SUMMED_DETAILS)

    def _add_failures(self, scores: list[Score]) -> None:
        counts = failure_counts(scores)
        self._failed += torch.tensor([float(counts[kind]) for kind in _FAILURES])

    def group_results(self) -> list[GroupResult]:
        """Return the mean reward and the variance of each group of this rank with at least two valid samples."""
        results = []
        for draw, (groups_B, statistics) in enumerate(self._groups):
            # `numpy.unique` can return the first index of each group.
            numbers, firsts = np.unique(groups_B.numpy(), return_index=True)
            for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True):
                count = float(statistics.count_B[first])
                if count >= 2:
                    variance = float(statistics.std_B[first]) ** 2 * (count - 1) / count
                    results.append(GroupResult(draw, row_of(number), float(statistics.mean_B[first]), variance))
        return results

    def averages(
        self, prefix: str, sum_over_ranks: Reduce, gather: Callable[[Details], list[Details]], seconds: float
    ) -> dict[str, float]:
        """Return averages `<prefix>/<name>` over all ranks, and the throughput. Collective."""
        columns = {}
        for name in self._batches[0]:
            values, counted = zip(*(batch[name] for batch in self._batches), strict=True)
            columns[name] = (torch.cat(values), torch.cat(counted))
        metrics = mean_over_ranks(columns, sum_over_ranks)
        detailed = torch.tensor([float(len(self._details))], dtype=torch.float64)
        # All ranks have the same environment, so the same names of events.
        names, events = list(self._events), torch.tensor(list(self._events.values()), dtype=torch.float64)
        sums = sum_over_ranks(torch.cat([self._failed, events, self._size, detailed])).tolist()
        *counts, samples, tokens, details = sums
        metrics |= zip([*(f"reward_{kind}" for kind in _FAILURES), *names], counts, strict=True)
        # Ranks may have different names of details.
        metrics |= mean_details(gather(self._details)) if details else {}
        if len(self._batches) > 1:
            metrics["generation_batches"] = float(len(self._batches))
        throughput = {"time/step": seconds, "samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds}
        return {**{f"{prefix}/{name}": value for name, value in metrics.items()}, **throughput}


def metrics_of_update(prefix: str, rate: float, norm: float | None, scale: LossScale | None) -> dict[str, float]:
    """Return the metrics of the optimizer steps of a model.

    Args:
        prefix: first part of the names.
        rate: learning rate.
        norm: norm of the last gradient; None if unknown.
        scale: scale of the loss; None without float16.
    """
    measures = {"lr": rate}
    if norm is not None:
        measures["gradient_norm"] = norm
    if scale is not None:
        measures |= {"loss_scale": scale.value, "skipped_updates": float(scale.skipped)}
    return {f"{prefix}/{name}": value for name, value in measures.items()}


@dataclass
class LearningSignal:
    """Warns once if no step of this process has changed the policy, because all samples of a prompt score alike."""

    _steps: int = 0
    _found: bool = False

    def check(self, gradient_norm: float | None, metrics: Mapping[str, float]) -> None:
        """Check one step.

        Args:
            gradient_norm: norm of the policy's gradient in the step; None without an update.
            metrics: metrics of the step.
        """
        self._steps += 1
        self._found |= gradient_norm != 0.0 or metrics.get("train/uniform_groups", 0.0) < 1
        if self._steps == _STEPS_WITHOUT_SIGNAL and not self._found:
            rank_zero_warn(
                f"the policy has not changed in {_STEPS_WITHOUT_SIGNAL} steps: all samples of a prompt had the same "
                f"score (train/reward={metrics['train/reward']:g}), so every gradient was 0. Look at samples, for "
                "example with trainer.predict. Scores of 0: is the prompt like the texts of the model's training "
                "(chat template), and does the reward accept the form of the answers? Scores of 1: the prompts are "
                "too easy"
            )
