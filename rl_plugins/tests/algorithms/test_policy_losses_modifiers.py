"""Modifiers of any policy loss: sequence and entropy masks, and imitation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.policy_losses.modifiers import (
    off_policy_sequence_mask,
    positive_nll,
    top_entropy_mask,
)
from rl_plugins.tests.algorithms.batches import make_batch
from rl_plugins.tests.algorithms.simulated_ranks import run_on_ranks
from rl_plugins.tests.loops import for_each


def test_off_policy_sequence_mask_drops_negative_samples_far_from_the_policy() -> None:
    nan = torch.nan
    # Means of old - current over valid tokens: 0.75, 0.75, 0.25, 0.5, -2, and an empty response.
    old = torch.tensor(
        [[1.0, 0.5, nan], [1.0, nan, 0.5], [0.5, 0.0, nan], [0.5, 0.5, nan], [-2.0, nan, nan], [nan] * 3]
    )
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    current = torch.where(mask.bool(), 0.0, nan).requires_grad_()
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0, -1.0])[:, None].expand(6, 3)
    keep = off_policy_sequence_mask(
        log_probs_BT=current, old_log_probs_BT=old, advantages_BT=advantages, response_mask_BT=mask, threshold=0.5
    )
    assert keep.tolist() == [False, True, True, True, True, True]
    assert keep.dtype == torch.bool


@for_each("rows", [slice(0, 8), slice(8, 16), slice(3, 4)])
def test_off_policy_sequence_mask_depends_on_each_row_alone(rows: slice) -> None:
    batch = make_batch(1).with_garbage()

    def keep(rows: slice) -> Tensor:
        return off_policy_sequence_mask(
            log_probs_BT=batch.log_probs[rows],
            old_log_probs_BT=batch.old[rows],
            advantages_BT=batch.advantages[rows],
            response_mask_BT=batch.mask[rows],
            threshold=0.0,
        )

    assert torch.equal(keep(slice(None))[rows], keep(rows))
    assert not keep(slice(None)).all()


@for_each(
    ("share", "kept"), [(0.2, [4.0]), (0.25, [3.0, 4.0]), (0.5, [2.0, 3.0, 4.0]), (1.0, [0.0, 1.0, 2.0, 3.0, 4.0])]
)
def test_top_entropy_mask_matches_a_computation_by_hand(share: float, kept: list[float]) -> None:
    """The quantile of five values is one of the values if share is a multiple of a quarter."""
    entropy = torch.tensor([[3.0, 0.0, 9.0], [1.0, 4.0, 2.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    result = top_entropy_mask(entropy_BT=entropy, response_mask_BT=mask, share=share)
    assert sorted(entropy[result.bool()].tolist()) == kept
    assert result.dtype == mask.dtype


@for_each("seed", range(3))
@for_each("share", [0.01, 0.2, 0.29, 0.3, 0.7, 0.9, 1.0])
@for_each("sizes", [[16], [5, 0, 11]])
def test_top_entropy_mask_keeps_tokens_above_the_quantile_of_all_ranks(
    seed: int, share: float, sizes: list[int]
) -> None:
    batch = make_batch(seed)
    entropy = batch.advantages.abs().round(decimals=1)
    valid = batch.mask.bool()
    quantile = np.quantile(entropy[valid].numpy(), 1 - share)
    # The quantile is a value, or one bit above or below the value.
    expected = valid & (entropy >= quantile - 1e-9)
    entropy = entropy.masked_fill(~valid, torch.nan)
    shards, masks = entropy.split(sizes), batch.mask.split(sizes)

    def one_rank(rank: int, _: Any, gather_over_ranks: Any) -> Tensor:
        return top_entropy_mask(
            entropy_BT=shards[rank], response_mask_BT=masks[rank], share=share, gather_over_ranks=gather_over_ranks
        )

    assert torch.equal(torch.cat(run_on_ranks(len(sizes), one_rank)).bool(), expected)


def test_top_entropy_mask_loses_no_token_by_rounding() -> None:
    """In floating point 0.29 * 100 is below 29."""
    mask = top_entropy_mask(entropy_BT=torch.arange(101.0)[None], response_mask_BT=torch.ones(1, 101), share=0.29)
    assert mask.sum() == 30


def test_top_entropy_mask_accepts_no_valid_tokens_and_equal_entropies() -> None:
    nothing = torch.zeros(2, 3)
    assert torch.equal(top_entropy_mask(entropy_BT=nothing * torch.nan, response_mask_BT=nothing), nothing)
    ones = torch.ones(2, 3)
    assert torch.equal(top_entropy_mask(entropy_BT=ones, response_mask_BT=ones), ones)
    with pytest.raises(ValueError, match="share=0: must be above 0"):
        top_entropy_mask(entropy_BT=ones, response_mask_BT=ones, share=0)


def test_positive_nll_counts_valid_tokens_of_positive_samples() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, torch.nan], [-3.0, -torch.inf, -1.0]], requires_grad=True)
    loss = positive_nll(
        log_probs_BT=log_probs,
        is_positive_B=torch.tensor([True, False]),
        response_mask_BT=torch.tensor([[1, 1, 0], [1, 1, 1]]),
    )
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert loss.tolist() == [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]
    assert gradient.tolist() == [[-1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]
