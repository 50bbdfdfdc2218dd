"""What is known of the distribution that a token was drawn from: `softmax(logits / temperature)` over the vocabulary.

Axes: `N` tokens, `V` vocabulary, `J` further tokens at the place of one, `K` columns: the token's log-prob, the entropy
and, on request, the sum of squares, the log-probs and the ids of the most likely tokens, and the log-probs of further
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LN_2 = math.log(2.0)
_CACHED_ELEMENTS, _BLOCK_ELEMENTS = 2**18, 2**22
"""Numbers in float32 at a time: on a processor, whose cache holds them, and on other devices."""


@dataclass(frozen=True)
class Columns:
    """Which numbers are computed of every distribution.

    Attributes:
        temperature: the logits are divided by it.
        sum_pi_squared: sum over the vocabulary of the squared probabilities, too.
        entropy_gradient: the entropy has a gradient.
        top_k: so many of the most likely tokens, the likeliest first, too: their log-probs, then their ids (as floating
            point numbers, which are exact up to a vocabulary of 2^24).
    """

    temperature: float = 1.0
    sum_pi_squared: bool = False
    entropy_gradient: bool = False
    top_k: int = 0

    @property
    def own(self) -> int:
        """How many columns there are without those of further tokens."""
        return 2 + self.sum_pi_squared + 2 * self.top_k


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, and float64 for float64: what sums over the vocabulary are taken in."""
    return torch.promote_types(dtype, torch.float32)


def distribution_columns(
    logits_NV: Tensor, tokens_N: Tensor, columns: Columns, further_NJ: Tensor | None = None
) -> Tensor:
    """The columns [N, K] in float32 (float64 of float64), a block of tokens at a time.

    The log-probs of the token and of further ones have a gradient; the entropy has one if asked for; the sum of squares
    and the most likely tokens have none. Logits in low precision are kept for backward as they are.
    """
    # Autocast would take the dot products in 16 bits.
    with torch.autocast(logits_NV.device.type, enabled=False):
        result_NK: Tensor = _Distribution.apply(logits_NV, tokens_N, further_NJ, columns)
    return result_NK


class _Distribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, tokens_N: Tensor, further_NJ: Tensor | None, columns: Columns) -> Tensor:
        tokens_NJ = with_further(tokens_N, further_NJ)
        result_NK, normaliser_N = columns_and_normaliser(logits_NV, tokens_NJ, columns)
        ctx.save_for_backward(logits_NV, tokens_NJ, normaliser_N, result_NK[:, 1].clone())
        ctx.columns = columns
        return result_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NK: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, tokens_NJ, normaliser_N, entropy_N = ctx.saved_tensors
        of_logits_NV = logits_gradient(logits_NV, tokens_NJ, normaliser_N, entropy_N, gradient_NK, ctx.columns)
        return of_logits_NV, None, None, None


def with_further(tokens_N: Tensor, further_NJ: Tensor | None) -> Tensor:
    """The tokens whose log-probs have a gradient, at each place the one that stands there first [N, 1 + J]."""
    return tokens_N[:, None] if further_NJ is None else torch.cat([tokens_N[:, None], further_NJ], dim=-1)


def columns_and_normaliser(logits_NV: Tensor, tokens_NJ: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """The columns [N, K], and what `logits_gradient` needs of the sums over the vocabulary [N]."""
    dtype, own = accumulation_dtype(logits_NV.dtype), columns.own
    result_NK = logits_NV.new_empty((len(logits_NV), own + tokens_NJ.shape[1] - 1), dtype=dtype)
    normaliser_N = logits_NV.new_empty(len(logits_NV), dtype=dtype)
    for rows in _blocks(logits_NV):
        logs_NV = _binary_logs(logits_NV[rows], columns)
        largest_N1 = logs_NV.amax(dim=-1, keepdim=True)
        weights_NV = logs_NV.sub_(largest_N1).exp2()
        total_N = weights_NV.sum(dim=-1)
        log_total_N = total_N.log2()
        log_probs_NJ = logs_NV.gather(-1, tokens_NJ[rows]).sub_(log_total_N[:, None]).mul_(_LN_2)
        result_NK[rows, 0], result_NK[rows, own:] = log_probs_NJ[:, 0], log_probs_NJ[:, 1:]
        result_NK[rows, 1] = (log_total_N - torch.linalg.vecdot(weights_NV, logs_NV) / total_N).mul_(_LN_2)
        if columns.sum_pi_squared:
            result_NK[rows, 2] = torch.linalg.vecdot(weights_NV, weights_NV) / total_N.square()
        if columns.top_k:
            tops_NK, ids_NK = logs_NV.topk(columns.top_k, dim=-1)
            tops_NK.sub_(log_total_N[:, None]).mul_(_LN_2)
            result_NK[rows, own - 2 * columns.top_k : own] = torch.cat([tops_NK, ids_NK], dim=-1)
        normaliser_N[rows] = log_total_N + largest_N1.squeeze(-1)
    return result_NK, normaliser_N


def logits_gradient(
    logits_NV: Tensor,
    tokens_NJ: Tensor,
    normaliser_N: Tensor,
    entropy_N: Tensor,
    gradient_NK: Tensor,
    columns: Columns,
) -> Tensor:
    """Gradient of the logits [N, V] in their dtype, from that of the columns.

    With logits z over the temperature, d log pi(token) / dz_v = [v is token] - pi_v, and, if the entropy H has a
    gradient, dH / dz_v = -pi_v (log pi_v + H).
    """
    gradient_NV = torch.empty_like(logits_NV)
    gradient_NK = gradient_NK / columns.temperature
    gradient_NJ = torch.cat([gradient_NK[:, :1], gradient_NK[:, columns.own :]], dim=-1)
    sum_N1 = gradient_NJ.sum(dim=-1, keepdim=True)
    for rows in _blocks(logits_NV):
        logs_NV = _binary_logs(logits_NV[rows], columns).sub_(normaliser_N[rows, None])
        if columns.entropy_gradient:
            pi_NV = logs_NV.exp2()
            of_entropy_NV = logs_NV.mul_(_LN_2).add_(entropy_N[rows, None]).mul_(gradient_NK[rows, 1, None])
            block_NV = of_entropy_NV.add_(sum_N1[rows]).mul_(pi_NV).neg_()
        else:
            block_NV = logs_NV.exp2_().mul_(-sum_N1[rows])
        gradient_NV[rows] = block_NV.scatter_add_(-1, tokens_NJ[rows], gradient_NJ[rows])
    return gradient_NV


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    elements = _CACHED_ELEMENTS if logits_NV.device.type == "cpu" else _BLOCK_ELEMENTS
    rows = max(1, elements // max(1, logits_NV.shape[-1]))
    return (slice(start, start + rows) for start in range(0, len(logits_NV), rows))


def _binary_logs(logits_NV: Tensor, columns: Columns) -> Tensor:
    """Logarithms to base 2 of the probabilities, but for their sum: a new tensor.

    Powers of 2 take processors a quarter of the time of powers of e.
    """
    scale = 1.0 / (columns.temperature * _LN_2)
    return logits_NV.to(accumulation_dtype(logits_NV.dtype), copy=True).mul_(scale)
