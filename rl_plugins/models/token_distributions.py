"""Numbers of the distributions of sampled tokens: `softmax(logits / temperature)` over the vocabulary.

Axes: `N` positions, `V` vocabulary, `J` extra tokens at each position, `K` most likely tokens, `C` columns: the
log-prob of the sampled token, the entropy and, on request, the sum of squares, the log-probs and ids of the most likely
tokens, and the log-probs of the extra tokens. `H` is the hidden width.

`distribution_columns` takes logits. `chunked_head_columns` takes hidden states and the output head: the logits exist
for one chunk of positions at a time. Backward computes the logits of each chunk again, and adds the gradients of the
hidden states and of the head's weight in place. Forward keeps the normaliser and the entropy of every position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LN_2 = math.log(2.0)


@dataclass(frozen=True)
class ColumnSpec:
    """Numbers to compute for every distribution, besides log-prob and entropy.

    Attributes:
        temperature: divisor of the logits.
        sum_pi_squared: add the sum of the squared probabilities over the vocabulary.
        entropy_gradient: give the entropy a gradient.
        top_k: number of most likely tokens to add, the likeliest first: the log-probs, then the ids (as floating point
            numbers, which are exact up to a vocabulary of 2^24).
    """

    temperature: float = 1.0
    sum_pi_squared: bool = False
    entropy_gradient: bool = False
    top_k: int = 0

    @property
    def num_fixed(self) -> int:
        """Number of columns without the columns of extra tokens."""
        return 2 + self.sum_pi_squared + 2 * self.top_k


class LogitsAtOnce(NamedTuple):
    """Numbers of logits that exist at the same time.

    Attributes:
        chunk: largest number of logits that the output head computes at once, in the dtype of the model.
        block: largest number of logits that are converted to float32 at once.
    """

    chunk: int
    block: int


def logits_at_once(device: torch.device) -> LogitsAtOnce:
    """Return the sizes that suit a device.

    A block fits into the cache of a CPU: a chunk has 32 MB in bfloat16, and a block 1 MB. A GPU needs large products
    and few kernels: a chunk has 256 MB in bfloat16, and a block 256 MB.
    """
    return LogitsAtOnce(2**24, 2**18) if device.type == "cpu" else LogitsAtOnce(2**27, 2**26)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over the vocabulary: float64 for float64, float32 for all other dtypes."""
    return torch.promote_types(dtype, torch.float32)


def distribution_columns(
    logits_NV: Tensor, tokens_N: Tensor, columns: ColumnSpec, extra_NJ: Tensor | None = None
) -> Tensor:
    """Compute the columns [N, C] in float32 (in float64 for float64 logits), one block of positions at a time.

    The log-probs of sampled and extra tokens have a gradient. The entropy has a gradient on request. The other columns
    have none. Backward keeps the logits in their own dtype.

    Args:
        logits_NV: logits of the distributions.
        tokens_N: ids of the sampled tokens.
        columns: numbers to compute.
        extra_NJ: ids of extra tokens whose log-probs are computed, too.
    """
    # Autocast would compute the dot products in 16 bits.
    with torch.autocast(logits_NV.device.type, enabled=False):
        result_NC: Tensor = _Distribution.apply(logits_NV, tokens_N, extra_NJ, columns)
    return result_NC


class _Distribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, tokens_N: Tensor, extra_NJ: Tensor | None, columns: ColumnSpec) -> Tensor:
        tokens_NJ = _with_extra(tokens_N, extra_NJ)
        result_NC, normaliser_N = _columns_and_normaliser(logits_NV, tokens_NJ, columns)
        ctx.save_for_backward(logits_NV, tokens_NJ, normaliser_N, result_NC[:, 1].clone())
        ctx.columns = columns
        return result_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NC: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, tokens_NJ, normaliser_N, entropy_N = ctx.saved_tensors
        logits_gradient_NV = _logits_gradient(logits_NV, tokens_NJ, normaliser_N, entropy_N, gradient_NC, ctx.columns)
        return logits_gradient_NV, None, None, None


def _with_extra(tokens_N: Tensor, extra_NJ: Tensor | None) -> Tensor:
    """Return the tokens whose log-probs have a gradient [N, 1 + J]: the sampled token first, then the extra tokens."""
    return tokens_N[:, None] if extra_NJ is None else torch.cat([tokens_N[:, None], extra_NJ], dim=-1)


def _columns_and_normaliser(logits_NV: Tensor, tokens_NJ: Tensor, columns: ColumnSpec) -> tuple[Tensor, Tensor]:
    """Compute the columns [N, C] and the normaliser of each distribution [N], the input of `_logits_gradient`."""
    dtype, num_fixed = accumulation_dtype(logits_NV.dtype), columns.num_fixed
    result_NC = logits_NV.new_empty((len(logits_NV), num_fixed + tokens_NJ.shape[1] - 1), dtype=dtype)
    normaliser_N = logits_NV.new_empty(len(logits_NV), dtype=dtype)
    for rows in _blocks(logits_NV):
        logs_NV = _binary_logs(logits_NV[rows], columns)
        largest_N1 = logs_NV.amax(dim=-1, keepdim=True)
        weights_NV = logs_NV.sub_(largest_N1).exp2()
        total_N = weights_NV.sum(dim=-1)
        log_total_N = total_N.log2()
        log_probs_NJ = logs_NV.gather(-1, tokens_NJ[rows]).sub_(log_total_N[:, None]).mul_(_LN_2)
        result_NC[rows, 0], result_NC[rows, num_fixed:] = log_probs_NJ[:, 0], log_probs_NJ[:, 1:]
        result_NC[rows, 1] = (log_total_N - torch.linalg.vecdot(weights_NV, logs_NV) / total_N).mul_(_LN_2)
        if columns.sum_pi_squared:
            result_NC[rows, 2] = torch.linalg.vecdot(weights_NV, weights_NV) / total_N.square()
        if columns.top_k:
            tops_NK, ids_NK = logs_NV.topk(columns.top_k, dim=-1)
            tops_NK.sub_(log_total_N[:, None]).mul_(_LN_2)
            result_NC[rows, num_fixed - 2 * columns.top_k : num_fixed] = torch.cat([tops_NK, ids_NK], dim=-1)
        normaliser_N[rows] = log_total_N + largest_N1.squeeze(-1)
    return result_NC, normaliser_N


def _logits_gradient(
    logits_NV: Tensor,
    tokens_NJ: Tensor,
    normaliser_N: Tensor,
    entropy_N: Tensor,
    gradient_NC: Tensor,
    columns: ColumnSpec,
) -> Tensor:
    """Compute the gradient of the logits [N, V], in the dtype of the logits, from the gradient of the columns.

    For logits z divided by the temperature, d log pi(token) / dz_v = [v is token] - pi_v. If the entropy H has a
    gradient, dH / dz_v = -pi_v (log pi_v + H).

    Args:
        logits_NV: logits of the distributions.
        tokens_NJ: ids of the sampled token and the extra tokens of each position.
        normaliser_N: normaliser of each distribution (see `_columns_and_normaliser`).
        entropy_N: entropy of each distribution in nats.
        gradient_NC: gradient of the columns.
        columns: numbers that were computed.
    """
    gradient_NV = torch.empty_like(logits_NV)
    gradient_NC = gradient_NC / columns.temperature
    gradient_NJ = torch.cat([gradient_NC[:, :1], gradient_NC[:, columns.num_fixed :]], dim=-1)
    sum_N1 = gradient_NJ.sum(dim=-1, keepdim=True)
    for rows in _blocks(logits_NV):
        logs_NV = _binary_logs(logits_NV[rows], columns).sub_(normaliser_N[rows, None])
        if columns.entropy_gradient:
            pi_NV = logs_NV.exp2()
            entropy_term_NV = logs_NV.mul_(_LN_2).add_(entropy_N[rows, None]).mul_(gradient_NC[rows, 1, None])
            block_NV = entropy_term_NV.add_(sum_N1[rows]).mul_(pi_NV).neg_()
        else:
            block_NV = logs_NV.exp2_().mul_(-sum_N1[rows])
        gradient_NV[rows] = block_NV.scatter_add_(-1, tokens_NJ[rows], gradient_NJ[rows])
    return gradient_NV


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    rows = max(1, logits_at_once(logits_NV.device).block // max(1, logits_NV.shape[-1]))
    return (slice(start, start + rows) for start in range(0, len(logits_NV), rows))


def _binary_logs(logits_NV: Tensor, columns: ColumnSpec) -> Tensor:
    """Return a new tensor of unnormalised log-probs to base 2.

    On a CPU, powers of 2 take a quarter of the time of powers of e.
    """
    scale = 1.0 / (columns.temperature * _LN_2)
    return logits_NV.to(accumulation_dtype(logits_NV.dtype), copy=True).mul_(scale)


# Output head, chunk by chunk ------------------------------------------------------------------------------------


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
        hidden_NH: hidden states before the head.
        weight_VH: weight of the head.
        bias_V: bias of the head, if any.
        tokens_N: ids of the sampled tokens.
        columns: numbers to compute.
        extra_NJ: ids of extra tokens whose log-probs are computed, too.
        rows: number of positions in a chunk.
    """
    hidden_NH, weight_VH, bias_V = cast_as_linear(hidden_NH, weight_VH, bias_V)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        result_NC: Tensor = _ChunkedHead.apply(hidden_NH, weight_VH, bias_V, tokens_N, extra_NJ, columns, rows)
    return result_NC


def cast_as_linear(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs of a linear layer as autocast does, which casts no inputs of a custom function."""
    device = hidden_NH.device.type
    if not torch.is_autocast_enabled(device) or hidden_NH.dtype == torch.float64:
        return hidden_NH, weight_VH, bias_V
    dtype = torch.get_autocast_dtype(device)
    return hidden_NH.to(dtype), weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)


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
        tokens_NJ = _with_extra(tokens_N, extra_NJ)
        parts = [
            _columns_and_normaliser(_logits_of(hidden_NH[chunk], weight_VH, bias_V), tokens_NJ[chunk], columns)
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
            gradient_NV = _logits_gradient(
                _logits_of(hidden_NH[chunk], weight_VH, bias_V),
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


def _logits_of(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    return hidden_NH @ weight_VH.T if bias_V is None else torch.addmm(bias_V, hidden_NH, weight_VH.T)
