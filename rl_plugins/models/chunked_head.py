"""Columns of token distributions from hidden states. The logits exist for one chunk of positions at a time.

Backward computes the logits of each chunk again, and adds the gradients of the hidden states and of the head's weight
in place. Forward keeps the normaliser and the entropy of every position.

Axes: `N` positions, `H` hidden, `V` vocabulary, `J` and `C`: see `token_distributions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_plugins.models.token_distributions import (
    ColumnSpec,
    columns_and_normaliser,
    logits_gradient,
    with_extra,
)


def chunked_head_columns(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    tokens_N: Tensor,
    columns: ColumnSpec,
    extra_NJ: Tensor | None = None,
    *,
    rows: int,
) -> Tensor:
    """Compute `distribution_columns` [N, C] of the logits `hidden_NH @ weight_VH.T + bias_V`, chunk by chunk.

    The logits have the dtype of the hidden states (under autocast, the dtype of autocast), as the output of the head
    has. Sums over the vocabulary, and sums of gradients over chunks, have at least float32.

    Args:
        hidden_NH: Hidden states before the head.
        weight_VH: Weight of the head.
        bias_V: Bias of the head, if any.
        tokens_N: Ids of the sampled tokens.
        columns: Numbers to compute.
        extra_NJ: Ids of extra tokens whose log-probs are computed, too.
        rows: Number of positions in a chunk.
    """
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device) and hidden_NH.dtype != torch.float64:
        # Autocast casts the inputs of a linear layer, but not of a custom function.
        dtype = torch.get_autocast_dtype(device)
        hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    with torch.autocast(device, enabled=False):
        result_NC: Tensor = _ChunkedHead.apply(hidden_NH, weight_VH, bias_V, tokens_N, extra_NJ, columns, rows)
    return result_NC


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        tokens_N: Tensor,
        extra_NJ: Tensor | None,
        columns: ColumnSpec,
        rows: int,
    ) -> Tensor:
        tokens_NJ = with_extra(tokens_N, extra_NJ)
        parts = [
            columns_and_normaliser(_logits(hidden_NH[chunk], weight_VH, bias_V), tokens_NJ[chunk], columns)
            for chunk in _chunks(len(hidden_NH), rows)
        ]
        result_NC, normaliser_N = (torch.cat(chunks) for chunks in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, tokens_NJ, normaliser_N, result_NC[:, 1].clone())
        ctx.columns, ctx.rows = columns, rows
        return result_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NC: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, tokens_NJ, normaliser_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = normaliser_N.dtype
        hidden_gradient_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        weight_gradient_VH = torch.zeros_like(weight_VH, dtype=dtype) if needs_weight else None
        bias_gradient_V = torch.zeros_like(bias_V, dtype=dtype) if needs_bias else None
        for chunk in _chunks(len(hidden_NH), ctx.rows):
            gradient_NV = logits_gradient(
                _logits(hidden_NH[chunk], weight_VH, bias_V),
                tokens_NJ[chunk],
                normaliser_N[chunk],
                entropy_N[chunk],
                gradient_NC[chunk],
                ctx.columns,
            )
            if bias_gradient_V is not None:
                bias_gradient_V += gradient_NV.sum(dim=0, dtype=dtype)
            if hidden_gradient_NH is not None:
                torch.mm(gradient_NV, weight_VH, out=hidden_gradient_NH[chunk])
            if weight_gradient_VH is None:
                continue
            if weight_VH.dtype == dtype:
                weight_gradient_VH.addmm_(gradient_NV.T, hidden_NH[chunk])
            else:
                weight_gradient_VH += gradient_NV.T @ hidden_NH[chunk]
        return (
            hidden_gradient_NH,
            None if weight_gradient_VH is None else weight_gradient_VH.to(weight_VH.dtype),
            None if bias_gradient_V is None else bias_gradient_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def _chunks(length: int, rows: int) -> Iterator[slice]:
    # At least one chunk, which may be empty.
    return (slice(start, start + rows) for start in range(0, max(1, length), rows))


def _logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    return hidden_NH @ weight_VH.T if bias_V is None else torch.addmm(bias_V, hidden_NH, weight_VH.T)
