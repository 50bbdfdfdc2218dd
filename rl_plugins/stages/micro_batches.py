"""Cutting a rank's samples into micro-batches that fit a token budget, the same number of them on every rank.

Sharded engines gather parameters in every forward pass, so ranks must run equally many. Samples of similar length go
together: little padding, and the loss does not care, for its denominators are global.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def num_micro_batches(prompt_lengths_B: Tensor, response_lengths_B: Tensor, tokens_per_micro_batch: int) -> int:
    """How many micro-batches keep this rank within the budget, if one sample does; at most one per sample."""
    if not len(prompt_lengths_B):
        return 0
    # Prompts are padded on the left and responses on the right: the longest of both may meet in one micro-batch.
    width = int(prompt_lengths_B.max()) + int(response_lengths_B.max())
    return math.ceil(len(prompt_lengths_B) / max(1, tokens_per_micro_batch // max(1, width)))


def common_number(
    prompt_lengths_B: Tensor,
    response_lengths_B: Tensor,
    tokens_per_micro_batch: int,
    max_over_ranks: Callable[[Tensor], Tensor],
) -> int:
    """How many every rank makes: the largest number that one of them needs. Collective. See `micro_batch_indices`."""
    wanted = num_micro_batches(prompt_lengths_B, response_lengths_B, tokens_per_micro_batch)
    return int(max_over_ranks(torch.tensor([wanted], dtype=torch.float64)).item())


def split_by_length(lengths_B: Tensor, count: int) -> list[Tensor]:
    """Indices of `count` micro-batches: sorted by length, cut into parts of (almost) equally many samples."""
    return list(torch.argsort(lengths_B, stable=True).tensor_split(count))


def micro_batch_indices(
    prompt_lengths_B: Tensor,
    response_lengths_B: Tensor,
    tokens_per_micro_batch: int,
    max_over_ranks: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Index tensors of this rank's micro-batches; every rank gets the same number. Collective.

    Args:
        prompt_lengths_B: tokens of each prompt. A rank with fewer samples than another may get empty micro-batches.
        response_lengths_B: tokens of each response.
        tokens_per_micro_batch: budget, padding counted; a sample longer than it makes a micro-batch of its own.
        max_over_ranks: maximum of a tensor over ranks.
    """
    count = common_number(prompt_lengths_B, response_lengths_B, tokens_per_micro_batch, max_over_ranks)
    return split_by_length(prompt_lengths_B + response_lengths_B, count)
