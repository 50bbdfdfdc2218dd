"""Critic: settings, objective, and explained variance of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.value_loss import value_loss
from rl_plugins.data.experience import Experience, computed
from rl_plugins.stages.metrics import TokenMetrics
from rl_plugins.stages.optimizer import MicroBatchLoss


@dataclass(frozen=True)
class ValueObjective:
    """Objective of a critic, in the training workers or in a pool.

    Attributes:
        clip: see `value_loss`.
        aggregation: see `aggregate`.
        scale_factor: see `aggregate`.
        updates: number of optimizer steps of a step; metrics are averaged over the optimizer steps.
    """

    clip: float | None
    aggregation: str
    scale_factor: float | None
    updates: int

    def losses(
        self,
        mini_batch: Experience,
        micro_batches: Sequence[Tensor],
        values_of: Callable[[Experience], Tensor],
        counts: GlobalCounts,
        metrics: TokenMetrics,
        device: torch.device | str,
    ) -> Iterator[MicroBatchLoss]:
        """Yield the loss of each micro-batch, and True with the last micro-batch.

        Args:
            mini_batch: samples with `values` (from before the update) and `returns`.
            micro_batches: indices of the samples of each micro-batch.
            values_of: function from a micro-batch to the critic's values [B, T], with gradient.
            counts: global counts of the mini-batch of all ranks.
            metrics: collector to which the metrics of the loss are added.
            device: device of the critic.
        """
        for position, indices in enumerate(micro_batches):
            micro = mini_batch[indices].trimmed().to(device)
            loss_BT, measured = value_loss(
                values_BT=values_of(micro),
                old_values_BT=computed(micro.values),
                returns_BT=computed(micro.returns),
                response_mask_BT=micro.response_mask,
                clip=self.clip,
            )
            loss = aggregate(loss_BT, micro.response_mask, self.aggregation, counts, scale_factor=self.scale_factor)
            metrics.add_each({f"critic/{name}": value for name, value in measured.items()}, micro.response_mask)
            metrics.add_sum("critic/loss", loss.detach() / (counts.ranks * self.updates))
            yield loss, position == len(micro_batches) - 1


def value_objective(algorithm: Algorithm, updates: int) -> ValueObjective:
    """Return the objective of an algorithm's critic; `updates` is the number of optimizer steps of a step."""
    return ValueObjective(algorithm.value_clip, algorithm.aggregation, algorithm.scale_factor, updates)


def explained_variance(
    values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]
) -> float:
    """Return `1 - Var(returns - values) / Var(returns)` of the valid tokens of all ranks; NaN if all returns are equal.

    1 is a perfect critic. 0 is a critic no better than a constant. Collective.
    """
    valid_BT = mask_BT.bool()
    returns_N, errors_N = returns_BT[valid_BT].double(), (returns_BT - values_BT)[valid_BT].double()
    sums = [returns_N.new_tensor(len(returns_N))]
    for column_N in (returns_N, errors_N):
        sums += [column_N.sum(), column_N.square().sum()]
    count, total, squares, error, squared_errors = sum_over_ranks(torch.stack(sums)).tolist()
    variance = squares - total * total / max(count, 1)
    if variance <= 1e-12 * squares:
        return float("nan")
    return 1 - (squared_errors - error * error / max(count, 1)) / variance
