"""Columns of token distributions straight from hidden states: the logits exist for one chunk of tokens at a time.

In backward the logits of a chunk are computed again, and the gradients of the hidden states and of the head's weight
are added up in place. What is kept from forward is the normaliser and the entropy of every token.

Axes: `N` tokens, `H` hidden, `V` vocabulary, `J` and `K`: see `token_distributions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_plugins.models.token_distributions import Columns, accumulation_dtype


def chunked_head_columns(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    tokens_N: Tensor,
    columns: Columns,
    further_NJ: Tensor | None = None,
    *,
    rows: int,
) -> Tensor:
    """`distribution_columns` [N, K] of the logits `hidden_NH @ weight_VH.T + bias_V`, `rows` tokens at a time.

    The logits are rounded to the dtype of the hidden states (under autocast, to its dtype), as the head itself
    would round them; sums over the vocabulary, and over chunks in the gradients, are taken in float32 at least.
    """
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device) and hidden_NH.dtype != torch.float64:
        # Autocast knows a linear layer, but not a custom function.
        dtype = torch.get_autocast_dtype(device)
        hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    with torch.autocast(device, enabled=False):
        result_NK: Tensor = _ChunkedHead.apply(hidden_NH, weight_VH, bias_V, tokens_N, further_NJ, columns, rows)
    return result_NK


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        tokens_N: Tensor,
        further_NJ: Tensor | None,
        columns: Columns,
        rows: int,
    ) -> Tensor:
        dtype = accumulation_dtype(hidden_NH.dtype)
        width = columns.own + (0 if further_NJ is None else further_NJ.shape[1])
        result_NK = hidden_NH.new_empty((len(hidden_NH), width), dtype=dtype)
        normaliser_N = hidden_NH.new_empty(len(hidden_NH), dtype=dtype)
        for chunk in _chunks(len(hidden_NH), rows):
            scaled_NV = _scaled_logits(hidden_NH[chunk], weight_VH, bias_V, columns.temperature)
            normaliser_N[chunk] = scaled_NV.logsumexp(dim=-1)
            log_pi_NV = scaled_NV.sub_(normaliser_N[chunk, None])
            pi_NV = log_pi_NV.exp()
            result_NK[chunk, 0] = log_pi_NV.gather(-1, tokens_N[chunk, None]).squeeze(-1)
            result_NK[chunk, 1] = -torch.linalg.vecdot(pi_NV, log_pi_NV)
            if columns.sum_pi_squared:
                result_NK[chunk, 2] = torch.linalg.vecdot(pi_NV, pi_NV)
            if columns.top_k:
                tops_NK, ids_NK = log_pi_NV.topk(columns.top_k, dim=-1)
                result_NK[chunk, columns.own - 2 * columns.top_k : columns.own] = torch.cat([tops_NK, ids_NK], dim=-1)
            if further_NJ is not None:
                result_NK[chunk, columns.own :] = log_pi_NV.gather(-1, further_NJ[chunk])
        # The tokens whose log-probs have a gradient.
        tokens_NJ = tokens_N[:, None] if further_NJ is None else torch.cat([tokens_N[:, None], further_NJ], dim=-1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, tokens_NJ, normaliser_N, result_NK[:, 1].clone())
        ctx.columns, ctx.rows = columns, rows
        return result_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, tokens_NJ, normaliser_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = normaliser_N.dtype
        hidden_gradient_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        weight_gradient_VH = torch.zeros_like(weight_VH, dtype=dtype) if needs_weight else None
        bias_gradient_V = torch.zeros_like(bias_V, dtype=dtype) if needs_bias else None
        for chunk in _chunks(len(hidden_NH), ctx.rows):
            scaled_NV = _scaled_logits(hidden_NH[chunk], weight_VH, bias_V, ctx.columns.temperature)
            gradient_NV = _logits_gradient(
                scaled_NV.sub_(normaliser_N[chunk, None]),
                tokens_NJ[chunk],
                entropy_N[chunk],
                gradient_NK[chunk] / ctx.columns.temperature,
                ctx.columns,
            )
            if bias_gradient_V is not None:
                bias_gradient_V += gradient_NV.sum(dim=0)
            gradient_NV = gradient_NV.to(hidden_NH.dtype)
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
    return (slice(start, start + rows) for start in range(0, length, rows))


def _scaled_logits(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits_NV = hidden_NH @ weight_VH.T if bias_V is None else torch.addmm(bias_V, hidden_NH, weight_VH.T)
    scaled_NV = logits_NV.to(accumulation_dtype(hidden_NH.dtype))
    return scaled_NV if temperature == 1.0 else scaled_NV.div_(temperature)


def _logits_gradient(
    log_pi_NV: Tensor, tokens_NJ: Tensor, entropy_N: Tensor, gradient_NK: Tensor, columns: Columns
) -> Tensor:
    """Gradient of the scaled logits, from that of the columns; takes the memory of `log_pi_NV`.

    d log pi(token) / dz_v = [v is token] - pi_v, and dH / dz_v = -pi_v (log pi_v + H).
    """
    gradient_NJ = torch.cat([gradient_NK[:, :1], gradient_NK[:, columns.own :]], dim=-1)
    log_prob_gradient_N = gradient_NJ.sum(dim=-1, keepdim=True)
    if columns.entropy_gradient:
        pi_NV = log_pi_NV.exp()
        factor_NV = log_pi_NV.add_(entropy_N[:, None]).mul_(gradient_NK[:, 1, None]).add_(log_prob_gradient_N)
        gradient_NV = pi_NV.mul_(factor_NV).neg_()
    else:
        gradient_NV = log_pi_NV.exp_().mul_(-log_prob_gradient_N)
    return gradient_NV.scatter_add_(-1, tokens_NJ, gradient_NJ)
