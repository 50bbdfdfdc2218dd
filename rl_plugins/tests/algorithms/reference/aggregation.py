"""Aggregation of a loss per token to one number."""

from __future__ import annotations

import math

from rl_plugins.tests.algorithms.reference.masked import Floats, Mask, row_values


def aggregate(
    *,
    loss_BT: Floats,
    response_mask_BT: Mask,
    mode: str,
    loss_scale_factor: float | None = None,
    ranks: int = 1,
    global_tokens: int | None = None,
    global_sequences: int | None = None,
) -> float:
    """Local loss of one micro-batch; missing counts are the counts of these rows.

    A sequence counts if it has a token.
    """
    rows = [row_values(values, mask) for values, mask in zip(loss_BT, response_mask_BT, strict=True)]
    rows = [row for row in rows if row]
    if ranks > 1 and (global_tokens is None or global_sequences is None):
        raise ValueError("several ranks need the counts of the global mini-batch")
    tokens = max(1, sum(len(row) for row in rows) if global_tokens is None else global_tokens)
    sequences = max(1, len(rows) if global_sequences is None else global_sequences)
    summed = math.fsum(math.fsum(row) for row in rows)
    if mode == "token-mean":
        return ranks * summed / tokens
    if mode == "token-sum":
        return ranks * summed
    if mode == "seq-mean-token-sum":
        return ranks * summed / sequences
    if mode == "seq-mean-token-mean":
        return ranks * math.fsum(math.fsum(row) / len(row) for row in rows) / sequences
    if mode == "seq-mean-token-sum-norm":
        factor = float(response_mask_BT.shape[1]) if loss_scale_factor is None else loss_scale_factor
        return ranks * summed / sequences / factor
    raise ValueError(mode)
