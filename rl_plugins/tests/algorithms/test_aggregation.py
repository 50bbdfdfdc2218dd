"""The five aggregations against plain loops, for any split over ranks and micro-batches."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from rl_plugins.algorithms.aggregation import AGGREGATIONS, GlobalCounts, aggregate, local_counts
from rl_plugins.tests.algorithms.batches import make_batch
from rl_plugins.tests.algorithms.reference import basics as reference
from rl_plugins.tests.loops import for_each

SPLITS = [[[16]], [[3, 13]], [[1] * 8, [1] * 8], [[5, 3], [8]], [[4], [4], [4], [3, 1]]]


@cache
def slopes(mode: str) -> np.ndarray:
    """Gradient of the aggregation of `make_batch(6)`, by plain loops: the result for a loss of 1 at one position."""
    mask = make_batch(6).mask.numpy()
    result = np.zeros(mask.shape)
    for position in np.ndindex(*mask.shape):
        one = np.zeros_like(mask)
        one[position] = 1.0
        result[position] = reference.aggregate(one, mask, mode, 7.0)
    return result


@for_each("mode", AGGREGATIONS)
@for_each("split", SPLITS)
@for_each("garbage", [0.0, torch.nan])
def test_aggregate_gives_the_same_loss_and_gradient_for_any_split(
    mode: str, split: list[list[int]], garbage: float
) -> None:
    batch = make_batch(6)
    values = batch.with_garbage(garbage).advantages.requires_grad_()
    shards = [size for rank in split for size in rank]
    ranks = len(split)
    masks = batch.mask.split([sum(rank) for rank in split])
    totals = torch.stack([local_counts(mask) for mask in masks]).sum(dim=0)
    counts = GlobalCounts(float(totals[0]), float(totals[1]), ranks)
    parts = zip(values.split(shards), batch.mask.split(shards), strict=True)
    # Ranks average their gradients.
    loss = sum(aggregate(v, m, mode, counts, scale_factor=7.0) for v, m in parts) / ranks
    assert isinstance(loss, torch.Tensor)
    numbers, mask = batch.advantages.detach().numpy(), batch.mask.numpy()
    assert loss.item() == pytest.approx(reference.aggregate(numbers, mask, mode, 7.0), rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient.numpy() == pytest.approx(slopes(mode), rel=1e-9, abs=1e-12)


@for_each("mode", AGGREGATIONS)
def test_aggregate_without_valid_tokens_is_zero_and_has_a_gradient(mode: str) -> None:
    """A rank with a micro-batch without valid tokens still runs its backward pass."""
    values = torch.full((2, 3), torch.nan, requires_grad=True)
    mask = torch.zeros(2, 3)
    counts = GlobalCounts(*local_counts(mask).tolist())
    assert (counts.tokens, counts.sequences) == (0, 0)
    loss = aggregate(values, mask, mode, counts, scale_factor=2.0)
    loss.backward()
    assert loss.item() == 0
    assert values.grad is not None and (values.grad == 0).all()
    no_width = aggregate(torch.zeros(2, 0, requires_grad=True), torch.zeros(2, 0), mode, counts, scale_factor=2.0)
    assert no_width.item() == 0 and no_width.requires_grad


def test_aggregate_refuses_an_unknown_aggregation_and_a_missing_scale_factor() -> None:
    values, counts = torch.ones(1, 1), GlobalCounts(1, 1)
    with pytest.raises(ValueError, match="needs scale_factor"):
        aggregate(values, values, "seq-mean-token-sum-norm", counts)
    with pytest.raises(ValueError, match=r"unknown aggregation 'mean': use one of token-mean"):
        aggregate(values, values, "mean", counts)
