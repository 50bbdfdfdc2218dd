"""Causal attention on processors that multiply bfloat16 numbers, as products of large matrices.

There oneDNN's products are several times as fast as torch's own attention kernel. A product rounds the scores to
bfloat16, and a second one gives what the first rounded away; their sum is good for 16 bits, where a softmax of large
scores needs them. What grows with the square of a sample exists for a block of its tokens at a time, and once more in
backward (FlashAttention: https://arxiv.org/abs/2205.14135, algorithm 1).

Axes: `N` samples, `Q` tokens that attend, `K` tokens that they see, `H` heads of queries, `G` heads of keys and values,
each of which serves `R` heads of queries, `B` pairs of a sample and such a head, `D` width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_plugins.processor import multiplies_bfloat16

# exp2 takes a quarter of the time of exp.
_LOG2_E = math.log2(math.e)

_BLOCK_ELEMENTS = 2**20
"""Scores in float32 at a time: 4 MB, which caches hold."""
_BLOCK_QUERIES = 128
"""Tokens that attend at a time: the fewer, the less is computed of what they do not see, by smaller products."""


def suits(query: Tensor) -> bool:
    """Whether this is the fastest way to attend for such queries."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and multiplies_bfloat16()


def product_attention(
    query_NQHD: Tensor, key_NKGD: Tensor, value_NKGD: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """The last tokens of some samples attend to themselves and to all before them; the result [N, Q, H, D].

    Args:
        query_NQHD: of the last Q of K tokens.
        key_NKGD: of all.
        value_NKGD: of all.
        scale: of the scores; by default one over the root of D.
        window: a token sees so many tokens at most, itself among them; all by default.
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
    """Tokens that attend together, and those that they may see."""

    pairs: slice
    queries: slice
    keys: slice

    def of_queries(self, values_BRQx: Tensor) -> Tensor:
        """Theirs, as rows of one product: [B, RQ, x]."""
        return values_BRQx[self.pairs, :, self.queries].flatten(1, 2)

    def of_keys(self, values_BKD: Tensor) -> Tensor:
        """[B, K, D]."""
        return values_BKD[self.pairs, self.keys]

    def set_queries(self, values_BRQx: Tensor, part: Tensor) -> None:
        """The reverse of `of_queries`."""
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
            block.set_queries(output_BRQD, torch.bmm(weights.div_(total).bfloat16(), block.of_keys(value_BKD)))
            block.set_queries(norms_BRQ1, total.log2_().add_(largest))
        ctx.save_for_backward(query_BRQD, key_BKD, value_BKD, output_BRQD, norms_BRQ1)
        ctx.scale, ctx.window = scale, window
        return output_BRQD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_BRQD: Tensor) -> tuple[Tensor | None, ...]:
        query_BRQD, key_BKD, value_BKD, output_BRQD, norms_BRQ1 = ctx.saved_tensors
        of_query_BRQD = torch.empty_like(query_BRQD)
        of_key_BKD, of_value_BKD = (torch.zeros_like(heads, dtype=torch.float32) for heads in (key_BKD, value_BKD))
        mean_BRQ1 = (gradient_BRQD.float() * output_BRQD).sum(dim=-1, keepdim=True)
        for block in _blocks(query_BRQD, key_BKD, ctx.window):
            scores = _scores(block, query_BRQD, key_BKD, ctx.scale, ctx.window)
            weights = scores.sub_(block.of_queries(norms_BRQ1)).exp2_()
            gradient = block.of_queries(gradient_BRQD)
            block.of_keys(of_value_BKD).add_(torch.bmm(weights.bfloat16().transpose(1, 2), gradient))
            of_weights = torch.bmm(gradient, block.of_keys(value_BKD).transpose(1, 2)).float()
            of_scores = of_weights.sub_(block.of_queries(mean_BRQ1)).mul_(weights).mul_(ctx.scale).bfloat16()
            block.set_queries(of_query_BRQD, torch.bmm(of_scores, block.of_keys(key_BKD)))
            block.of_keys(of_key_BKD).add_(torch.bmm(of_scores.transpose(1, 2), block.of_queries(query_BRQD)))
        return of_query_BRQD, of_key_BKD.to(key_BKD.dtype), of_value_BKD.to(value_BKD.dtype), None, None


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
    """Logarithms to base 2 of the weights but for a sum [B, RQ, K], float32; unseen tokens have minus infinity."""
    query, key = block.of_queries(query_BRQD), block.of_keys(key_BKD).transpose(1, 2)
    rounded = torch.baddbmm(query.new_empty(()), query, key, beta=0, alpha=scale * _LOG2_E)
    rest = torch.baddbmm(rounded, query, key, beta=-1, alpha=scale * _LOG2_E)
    scores = rounded.float().add_(rest)
    count, seen = block.queries.stop - block.queries.start, key.shape[-1]
    first = key_BKD.shape[1] - query_BRQD.shape[2] + block.queries.start - block.keys.start
    nothing = scores.new_full((count, seen), -torch.inf)
    unseen = nothing.triu(first + 1)
    if window < seen:
        unseen += nothing.tril(first - window)
    scores.view(len(scores), -1, count, seen).add_(unseen)
    return scores
