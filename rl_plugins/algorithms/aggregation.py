"""From per-token losses to one number, with the denominators of the global mini-batch.

Each rank computes `aggregate(...)` of its micro-batch; the sum over micro-batches, averaged over the data-parallel
ranks (which is what DDP, ZeRO and FSDP do with gradients), is the loss of the global mini-batch. So the gradient does
not depend on how samples are split over ranks and micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class GlobalCounts:
    """Sizes of the global mini-batch: valid tokens and sequences with at least one, over all ranks; and the ranks."""

    tokens: float
    sequences: float
    ranks: int = 1


def local_counts(response_mask_BT: Tensor) -> Tensor:
    """Valid tokens and non-empty sequences of this rank, [2] float64: sum it over ranks for `GlobalCounts`."""
    tokens_B = response_mask_BT.sum(dim=-1)
    return torch.stack([tokens_B.sum(), (tokens_B > 0).sum()]).double()


def aggregate(
    values_BT: Tensor, response_mask_BT: Tensor, mode: str, counts: GlobalCounts, *, scale_factor: float | None = None
) -> Tensor:
    """This micro-batch's part of the aggregated loss.

    With D ranks, N tokens and S sequences of the global mini-batch:

    | mode | value |
    |---|---|
    | token-mean | D sum(m l) / N |
    | token-sum | D sum(m l) |
    | seq-mean-token-sum | D sum_i(sum_t m l) / S |
    | seq-mean-token-mean | D sum_i(sum_t m l / L_i) / S |
    | seq-mean-token-sum-norm | seq-mean-token-sum / scale_factor |

    Args:
        values_BT: per-token losses; masked entries may hold anything.
        response_mask_BT: 1 on tokens that count.
        mode: one of `AGGREGATIONS`.
        counts: of the global mini-batch.
        scale_factor: the constant of `seq-mean-token-sum-norm` (Dr.GRPO: the generation budget).

    Raises:
        ValueError: unknown mode, or `seq-mean-token-sum-norm` without `scale_factor`.

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
            raise ValueError("seq-mean-token-sum-norm needs scale_factor, the constant it divides by")
        return counts.ranks * sums_B.sum() / max(counts.sequences, 1) / scale_factor
    raise ValueError(f"unknown aggregation {mode!r}: use one of {', '.join(AGGREGATIONS)}")
