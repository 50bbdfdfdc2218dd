"""Aggregation of per-token losses to one number, with the denominators of the global mini-batch.

Each rank computes `aggregate(...)` of its micro-batches. The sum over micro-batches, averaged over the data-parallel
ranks (as DDP, ZeRO and FSDP average gradients), is the loss of the global mini-batch. So the gradient does not depend
on the split of samples over ranks and micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class GlobalCounts:
    """Sizes of the global mini-batch, over all ranks.

    Attributes:
        tokens: number of valid tokens.
        sequences: number of sequences with at least one valid token before a rollout correction rejects tokens.
        ranks: number of data-parallel ranks.
    """

    tokens: float
    sequences: float
    ranks: int = 1


def local_counts(response_mask_BT: Tensor, rejected_B: Tensor | None = None) -> Tensor:
    """Count valid tokens and sequences of this rank, [2] float64; the sum over ranks makes `GlobalCounts`.

    A rejected sequence counts as a sequence with loss 0. So a mean over sequences estimates the same expectation,
    however many sequences are rejected, and a bypass correction, which rejects in each micro-batch, has the same mean.

    Args:
        rejected_B: True for samples without a token in the mask, because a rollout correction rejected all tokens.
    """
    tokens_B = response_mask_BT.sum(dim=-1)
    counted_B = tokens_B > 0 if rejected_B is None else (tokens_B > 0) | rejected_B
    return torch.stack([tokens_B.sum(), counted_B.sum()]).double()


def aggregate(
    values_BT: Tensor, response_mask_BT: Tensor, mode: str, counts: GlobalCounts, *, scale_factor: float | None = None
) -> Tensor:
    """Compute the contribution of a micro-batch to the aggregated loss.

    With D ranks, and N tokens and S sequences in the global mini-batch:

    | mode | value |
    |---|---|
    | token-mean | D sum(m l) / N |
    | token-sum | D sum(m l) |
    | seq-mean-token-sum | D sum_i(sum_t m l) / S |
    | seq-mean-token-mean | D sum_i(sum_t m l / L_i) / S |
    | seq-mean-token-sum-norm | seq-mean-token-sum / scale_factor |

    Args:
        values_BT: loss of each token; masked entries may hold anything.
        response_mask_BT: 1 on valid tokens.
        mode: one of `AGGREGATIONS`.
        counts: sizes of the global mini-batch.
        scale_factor: constant divisor of `seq-mean-token-sum-norm` (Dr.GRPO: the generation budget).

    Raises:
        ValueError: the mode is unknown, or `seq-mean-token-sum-norm` has no `scale_factor`.

    Source: `token-mean` DAPO https://arxiv.org/abs/2503.14476 eq. 12; `seq-mean-token-mean` GRPO
    https://arxiv.org/abs/2402.03300 eq. 3; `seq-mean-token-sum-norm` Dr.GRPO https://arxiv.org/abs/2503.20783.
    """
    kept_BT = torch.where(response_mask_BT.bool(), values_BT, 0)
    if mode == "token-mean":
        return counts.ranks * kept_BT.sum() / max(counts.tokens, 1)
    if mode == "token-sum":
        return counts.ranks * kept_BT.sum()
    sums_B = kept_BT.sum(dim=-1)
    if mode == "seq-mean-token-sum":
        return counts.ranks * sums_B.sum() / max(counts.sequences, 1)
    if mode == "seq-mean-token-mean":
        means_B = sums_B / response_mask_BT.sum(dim=-1).clamp(min=1)
        return counts.ranks * means_B.sum() / max(counts.sequences, 1)
    if mode == "seq-mean-token-sum-norm":
        if scale_factor is None:
            raise ValueError("seq-mean-token-sum-norm needs scale_factor, its constant divisor")
        return counts.ranks * sums_B.sum() / max(counts.sequences, 1) / scale_factor
    raise ValueError(f"unknown aggregation {mode!r}: use one of {', '.join(AGGREGATIONS)}")
