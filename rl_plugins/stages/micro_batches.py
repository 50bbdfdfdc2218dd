"""Cutting a rank's examples into micro-batches that fit a token budget, the same number of them on every rank.

Sharded engines gather parameters in every forward pass, so ranks must run equally many. An example is a sample, or two
that stay together; the loss does not care which meet, for its denominators are global. With packing, micro-batches have
about the same number of tokens, so that ranks that run them in turn do not wait. Without, examples of similar length go
together, for little padding.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins.data.experience import Experience

MaxOverRanks = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Lengths:
    """How long the examples of a rank are.

    Attributes:
        prompts_B: tokens of each prompt.
        responses_B: tokens of each example's longest response.
        tokens_B: of all samples of each example.
        samples_per_example: how many samples an example has.
    """

    prompts_B: Tensor
    responses_B: Tensor
    tokens_B: Tensor
    samples_per_example: int = 1

    @classmethod
    def of(cls, samples: Experience) -> Lengths:
        """Those of single samples."""
        return cls(samples.prompt_lengths, samples.response_lengths, samples.sequence_lengths)


@dataclass(frozen=True)
class Cutter:
    """How examples are cut into micro-batches.

    Attributes:
        tokens_per_micro_batch: budget; an example longer than it makes a micro-batch of its own.
        packing: the budget counts real tokens; if not, padding too.
        max_over_ranks: maximum of a tensor over ranks.
    """

    tokens_per_micro_batch: int
    packing: bool
    max_over_ranks: MaxOverRanks

    def common_number(self, lengths: Lengths) -> int:
        """How many micro-batches every rank makes: the largest number that one of them needs. Collective."""
        wanted = self._packed_number(lengths) if self.packing else self._padded_number(lengths)
        return int(self.max_over_ranks(torch.tensor([wanted], dtype=torch.float64)).item())

    def split(self, lengths: Lengths, count: int) -> list[Tensor]:
        """Indices of `count` micro-batches; where there are fewer examples, the last are empty."""
        return balanced(lengths.tokens_B, count) if self.packing else split_by_length(lengths, count)

    def indices(self, lengths: Lengths) -> list[Tensor]:
        """Index tensors of this rank's micro-batches; every rank gets the same number. Collective."""
        return self.split(lengths, self.common_number(lengths))

    def _packed_number(self, lengths: Lengths) -> int:
        tokens_B, budget = lengths.tokens_B, self.tokens_per_micro_batch
        if not len(tokens_B):
            return 0
        count = min(len(tokens_B), math.ceil(int(tokens_B.sum()) / budget))
        while any(len(part) > 1 and int(tokens_B[part].sum()) > budget for part in balanced(tokens_B, count)):
            count += 1
        return count

    def _padded_number(self, lengths: Lengths) -> int:
        if not len(lengths.prompts_B):
            return 0
        # Prompts are padded on the left and responses on the right: the longest of both may meet in one micro-batch.
        width = lengths.samples_per_example * int(lengths.prompts_B.max() + lengths.responses_B.max())
        return math.ceil(len(lengths.prompts_B) / max(1, self.tokens_per_micro_batch // max(1, width)))


def split_by_length(lengths: Lengths, count: int) -> list[Tensor]:
    """Sorted by length, cut into parts of (almost) equally many examples."""
    return list(torch.argsort(lengths.prompts_B + lengths.responses_B, stable=True).tensor_split(count))


def balanced(tokens_B: Tensor, count: int) -> list[Tensor]:
    """Indices of `count` parts of about equally many tokens, the largest part first.

    The longest example goes first, each to the part with the fewest tokens (LPT, Graham 1969: the largest part is at
    most 4/3 of the best possible); where cutting the sorted examples does better, as it may with a handful of them,
    that is taken. With more parts the largest of LPT is never larger, so a budget that some number of parts keeps is
    kept by any larger number. Inside a part, examples are sorted by length.
    """
    tokens = tokens_B.tolist()
    longest_first = sorted(range(len(tokens)), key=lambda index: (-tokens[index], index))
    parts: list[list[int]] = [[] for _ in range(count)]
    smallest_first = [(0, part) for part in range(count)]
    for index in longest_first:
        total, part = heapq.heappop(smallest_first)
        parts[part].append(index)
        heapq.heappush(smallest_first, (total + tokens[index], part))
    cut = [part.flip(0).tolist() for part in torch.tensor(longest_first[::-1]).tensor_split(count)]

    def size(part: list[int]) -> int:
        return sum(tokens[index] for index in part)

    chosen = min(parts, cut, key=lambda candidate: max(map(size, candidate)))
    return [torch.tensor(part, dtype=torch.int64) for part in sorted(chosen, key=size, reverse=True)]
