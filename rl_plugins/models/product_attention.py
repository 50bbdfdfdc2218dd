"""Causal attention as products of large matrices, for CPUs that multiply bfloat16 numbers.

On such CPUs, matrix products of oneDNN are several times as fast as the attention kernel of torch. A first product
rounds the scores to bfloat16. A second product computes the rounding error of the first. The sum of both has 16 bits,
which the softmax of large scores needs. Scores exist for one block of queries at a time, and are computed again in
backward (FlashAttention, https://arxiv.org/abs/2205.14135, algorithm 1).

Axes: `N` samples, `Q` queries, `K` keys, `H` heads of queries, `G` heads of keys and values (each head serves `R` heads
of queries), `B` pairs of a sample and a head of keys, `D` width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_plugins.cpu_bfloat16 import multiplies_bfloat16

# exp2 takes a quarter of the time of exp.
_LOG2_E = math.log2(math.e)

_BLOCK_ELEMENTS = 2**20
"""Largest number of float32 scores in a block: 4 MB, which fit into a cache."""
_BLOCK_QUERIES = 128
"""Largest number of queries in a block. Small blocks compute fewer masked scores, with smaller matrix products."""


def suits(query: Tensor) -> bool:
    """Return True if `product_attention` is the fastest attention for such queries."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and multiplies_bfloat16()


def product_attention(
    query_NQHD: Tensor, key_NKGD: Tensor, value_NKGD: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Compute causal attention of the last Q of K tokens of each sample [N, Q, H, D].

    Args:
        query_NQHD: Queries of the last Q tokens.
        key_NKGD: Keys of all tokens.
        value_NKGD: Values of all tokens.
        scale: Factor of the scores, by default one over the square root of D.
        window: Number of tokens visible to a token, including the token itself. By default all earlier tokens.
    """
    n, q, h, d = query_NQHD.shape
    groups = key_NKGD.shape[2]
    # Heads that share a key are rows of one product.
    query_BRQD = query_NQHD.view(n, q, groups, -1, d).permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()
    key_BKD, value_BKD = (heads.transpose(1, 2).flatten(0, 1).contiguous() for heads in (key_NKGD, value_NKGD))
    scale = d**-0.5 if scale is None else scale
    output_BRQD: Any = _ProductAttention.apply(query_BRQD, key_BKD, value_BKD, scale, window or key_NKGD.shape[1])
    heads_NQHD: Tensor = output_BRQD.view(n, h, q, -1).transpose(1, 2)
    return heads_NQHD


class _Block(NamedTuple):
    """Slices of the queries of one block, and of the keys visible to them."""

    pairs: slice
    queries: slice
    keys: slice

    def take_queries(self, values_BRQx: Tensor) -> Tensor:
        """Return the values of the block's queries, as rows of one matrix product [B, RQ, x]."""
        return values_BRQx[self.pairs, :, self.queries].flatten(1, 2)

    def take_keys(self, values_BKD: Tensor) -> Tensor:
        """[B, K, D]."""
        return values_BKD[self.pairs, self.keys]

    def set_queries(self, values_BRQx: Tensor, part: Tensor) -> None:
        """Write values in the form of `take_queries` to the block's queries."""
        place = values_BRQx[self.pairs, :, self.queries]
        place.copy_(part.view(place.shape))


class _ProductAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_BRQD: Tensor, key_BKD: Tensor, value_BKD: Tensor, scale: float, window: int) -> Tensor:
        output_BRQD = query_BRQD.new_empty(*query_BRQD.shape[:-1], value_BKD.shape[-1])
        norms_BRQ1 = query_BRQD.new_empty(*query_BRQD.shape[:-1], 1, dtype=torch.float32)
        for block in _blocks(query_BRQD, key_BKD, window):
            scores = _scores(block, query_BRQD, key_BKD, scale, window)
            largest = scores.amax(dim=-1, keepdim=True)
            weights = scores.sub_(largest).exp2_()
            total = weights.sum(dim=-1, keepdim=True)
            block.set_queries(output_BRQD, torch.bmm(weights.div_(total).bfloat16(), block.take_keys(value_BKD)))
            block.set_queries(norms_BRQ1, total.log2_().add_(largest))
        ctx.save_for_backward(query_BRQD, key_BKD, value_BKD, output_BRQD, norms_BRQ1)
        ctx.scale, ctx.window = scale, window
        return output_BRQD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BRQD: Tensor) -> tuple[Tensor | None, ...]:
        query_BRQD, key_BKD, value_BKD, output_BRQD, norms_BRQ1 = ctx.saved_tensors
        query_gradient_BRQD = torch.empty_like(query_BRQD)
        key_gradient_BKD, value_gradient_BKD = (
            torch.zeros_like(heads, dtype=torch.float32) for heads in (key_BKD, value_BKD)
        )
        mean_BRQ1 = (gradient_BRQD.float() * output_BRQD).sum(dim=-1, keepdim=True)
        for block in _blocks(query_BRQD, key_BKD, ctx.window):
            scores = _scores(block, query_BRQD, key_BKD, ctx.scale, ctx.window)
            weights = scores.sub_(block.take_queries(norms_BRQ1)).exp2_()
            gradient = block.take_queries(gradient_BRQD)
            block.take_keys(value_gradient_BKD).add_(torch.bmm(weights.bfloat16().transpose(1, 2), gradient))
            weights_gradient = torch.bmm(gradient, block.take_keys(value_BKD).transpose(1, 2)).float()
            scores_gradient = (
                weights_gradient.sub_(block.take_queries(mean_BRQ1)).mul_(weights).mul_(ctx.scale).bfloat16()
            )
            block.set_queries(query_gradient_BRQD, torch.bmm(scores_gradient, block.take_keys(key_BKD)))
            block.take_keys(key_gradient_BKD).add_(
                torch.bmm(scores_gradient.transpose(1, 2), block.take_queries(query_BRQD))
            )
        return (
            query_gradient_BRQD,
            key_gradient_BKD.to(key_BKD.dtype),
            value_gradient_BKD.to(value_BKD.dtype),
            None,
            None,
        )


def _blocks(query_BRQD: Tensor, key_BKD: Tensor, window: int) -> Iterator[_Block]:
    all_pairs, shared, q, _ = query_BRQD.shape
    k = key_BKD.shape[1]
    queries = min(q, _BLOCK_QUERIES, max(1, _BLOCK_ELEMENTS // (shared * k)))
    pairs = max(1, _BLOCK_ELEMENTS // (shared * queries * k))
    for pair in range(0, all_pairs, pairs):
        for first in range(0, q, queries):
            end = min(q, first + queries)
            keys = slice(max(0, k - q + first - window + 1), k - q + end)
            yield _Block(slice(pair, pair + pairs), slice(first, end), keys)


def _scores(block: _Block, query_BRQD: Tensor, key_BKD: Tensor, scale: float, window: int) -> Tensor:
    """Compute unnormalised attention weights as logarithms to base 2, -inf at masked keys [B, RQ, K], float32."""
    query, key = block.take_queries(query_BRQD), block.take_keys(key_BKD).transpose(1, 2)
    rounded = torch.baddbmm(query.new_empty(()), query, key, beta=0, alpha=scale * _LOG2_E)
    rest = torch.baddbmm(rounded, query, key, beta=-1, alpha=scale * _LOG2_E)
    scores = rounded.float().add_(rest)
    count, seen = block.queries.stop - block.queries.start, key.shape[-1]
    first = key_BKD.shape[1] - query_BRQD.shape[2] + block.queries.start - block.keys.start
    minus_infinity = scores.new_full((count, seen), -torch.inf)
    masked = minus_infinity.triu(first + 1)
    if window < seen:
        masked += minus_infinity.tril(first - window)
    scores.view(len(scores), -1, count, seen).add_(masked)
    return scores
