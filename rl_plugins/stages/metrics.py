"""Averages over the valid tokens and samples of all ranks, with one collective for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]


@dataclass
class TokenMetrics:
    """Collects per-token metrics over the micro-batches of a step; nothing is synchronised until `averages`."""

    _sums: dict[str, Tensor] = field(default_factory=dict)
    _counts: dict[str, Tensor] = field(default_factory=dict)
    _maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor], mask_BT: Tensor, *, maximum: bool = False) -> None:
        """Take in [B, T] tensors; with `maximum`, keep the largest value too."""
        valid_BT = mask_BT.bool()
        for name, values_BT in values.items():
            kept_BT = torch.where(valid_BT, values_BT.detach(), 0)
            self._increase(self._sums, name, kept_BT.sum())
            self._increase(self._counts, name, valid_BT.sum())
            if maximum:
                masked_N = values_BT.detach().masked_fill(~valid_BT, -torch.inf).flatten()
                # An empty micro-batch has a maximum, too.
                largest = torch.cat([masked_N, masked_N.new_full((1,), -torch.inf)]).max()
                self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def add_sum(self, name: str, value: Tensor) -> None:
        """Take in a number whose sum over micro-batches and ranks is wanted."""
        self._increase(self._sums, name, value)

    def averages(self, sum_over_ranks: Reduce, max_over_ranks: Reduce) -> dict[str, float]:
        """`train/<name>` means (sums for `add_sum`) and, where a token was valid, `train/<name>_max`. Collective."""
        names = sorted(self._sums)
        local = [self._sums[name].double() for name in names]
        local += [self._counts.get(name, torch.zeros(())).double() for name in names]
        total = sum_over_ranks(torch.stack([value.cpu() for value in local])).tolist()
        metrics = {}
        for position, name in enumerate(names):
            divisor = max(total[len(names) + position], 1.0) if name in self._counts else 1.0
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
    """Mean of each `(values [B], which count [B])` over all ranks; NaN where none counts. Collective."""
    sums = [torch.where(counted, values, 0).sum() for values, counted in columns.values()]
    counts = [counted.sum() for _, counted in columns.values()]
    total = sum_over_ranks(torch.stack([value.double() for value in sums + counts])).tolist()
    half = len(columns)
    return {name: total[i] / total[half + i] if total[half + i] else float("nan") for i, name in enumerate(columns)}
