"""Cut the examples of a rank into micro-batches within a budget of tokens, the same number on every rank.

A sharded model gathers parameters in every forward pass, so all ranks must run equally many passes. An example is one
sample, or two inseparable samples. The grouping does not change the loss, because its denominators are global.

With packing, micro-batches have about equal numbers of tokens, so ranks do not wait for each other. If the model runs a
prompt once for all its samples, samples of a prompt stay together. Without packing, a micro-batch has examples of
similar length, to reduce padding.

A budget of patches bounds the images of a micro-batch, too. The images of a prompt cost `patches / patch budget * token
budget` tokens, at most the token budget. An example costs the larger of its tokens and its images, so a micro-batch
within the budget of tokens is within both budgets.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_plugins.data.experience import Experience
from rl_plugins.data.images import IMAGE_INPUTS, ImageInputs, num_patches
from rl_plugins.models.packing import even_parts, first_of_prompt
from rl_plugins.vision_language import patch_size

MaxOverRanks = Callable[[Tensor], Tensor]

COPY_COST = 0.125
"""Cost of a prompt token for each further sample, in tokens: attention keeps only the keys and values of the token."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of the examples of a rank.

    Attributes:
        prompts_B: number of tokens of each prompt.
        responses_B: number of tokens of each example's longest response.
        tokens_B: number of tokens of all samples of each example.
        first_B: index of the first example with the same prompt.
        samples_per_example: number of samples of an example.
        sequences_per_sample: largest number of sequences of a sample; without packing, each sequence is a row.
        images_B: inputs of the images of each prompt; None if no prompt has an image.
    """

    prompts_B: Tensor
    responses_B: Tensor
    tokens_B: Tensor
    first_B: Tensor
    samples_per_example: int = 1
    sequences_per_sample: int = 1
    images_B: Sequence[ImageInputs | None] | None = None

    @classmethod
    def of(cls, samples: Experience) -> Lengths:
        """Return the lengths of examples with one sample each."""
        return cls.of_examples(samples, torch.arange(len(samples))[:, None])

    @classmethod
    def of_examples(cls, samples: Experience, members_BK: Tensor) -> Lengths:
        """Return the lengths of examples of K samples with one prompt; `members_BK` has the indices of the samples."""
        prompt_mask_RP = samples.attention_mask[:, : samples.prompts.shape[1]]
        own_B, images = members_BK[:, 0], samples.columns.get(IMAGE_INPUTS)
        images_B = images and [images[index] for index in own_B.tolist()]
        return cls(
            samples.prompt_lengths[own_B],
            samples.response_lengths[members_BK].amax(dim=1),
            samples.sequence_lengths[members_BK].sum(dim=1),
            first_of_prompt(samples.prompts[own_B], prompt_mask_RP[own_B], images_B),
            samples_per_example=members_BK.shape[1],
            sequences_per_sample=most_sequences(samples),
            images_B=images_B,
        )


def most_sequences(samples: Experience) -> int:
    """Return the largest number of sequences of a sample."""
    if samples.sequences is None or not samples.sequences.numel():
        return 1
    return 1 + int(samples.sequences.max())


class Bundle(NamedTuple):
    """Examples of one micro-batch, which stay together.

    Attributes:
        indices: indices of the examples.
        tokens: cost of the bundle: tokens of the forward pass, plus `COPY_COST` per prompt token for each further
            sample; or the cost of the images, if larger.
    """

    indices: list[int]
    tokens: int


@dataclass(frozen=True)
class PatchBudget:
    """Budget of the patches of images in a micro-batch.

    Attributes:
        patches: budget in patches; a prompt with more patches gets its own micro-batches.
        patch_size: width and height of a patch in pixels.
    """

    patches: int
    patch_size: int

    @classmethod
    def of(cls, patches: int | None, model: nn.Module) -> PatchBudget | None:
        """Return the budget for a model; None without a bound.

        Raises:
            ConfigError: the model has no vision tower, or has patches of no fixed size.
        """
        return None if patches is None else cls(patches, patch_size(model))


@dataclass(frozen=True)
class Cutter:
    """Cuts examples into micro-batches.

    Attributes:
        tokens_per_micro_batch: budget in tokens; a longer example gets its own micro-batch.
        packing: True if the budget counts only real tokens; otherwise padding counts too.
        shares_prompts: True if the budget counts a prompt once for all its samples in a micro-batch, plus `COPY_COST`
            for each further sample; only with `packing`.
        max_over_ranks: collective function; returns the maximum of a tensor over ranks.
        patch_budget: budget of the images; None for no bound.
    """

    tokens_per_micro_batch: int
    packing: bool
    shares_prompts: bool
    max_over_ranks: MaxOverRanks
    patch_budget: PatchBudget | None = None

    def common_number(self, lengths: Lengths) -> int:
        """Return the number of micro-batches of every rank: the largest number of all ranks. Collective."""
        wanted = self._packed_number(lengths) if self.packing else self._padded_number(lengths)
        return int(self.max_over_ranks(torch.tensor([wanted], dtype=torch.float64)).item())

    def split(self, lengths: Lengths, count: int) -> list[Tensor]:
        """Return the indices of `count` micro-batches; with fewer examples, the last micro-batches are empty."""
        if not self.packing:
            return split_by_length(lengths, count)
        # Take the bundling with the fewest tokens among the bundlings for `count` micro-batches.
        images = self._image_costs(lengths)
        for most in self._bundle_sizes:
            bundled = self._bundles(lengths, images, most, at_least=count)
            parts = balanced([bundle.tokens for bundle in bundled], count)
            if self._fit(bundled, parts):
                break
        members = [[index for place in part for index in bundled[place].indices] for part in parts]
        return [torch.tensor(part, dtype=torch.int64) for part in members]

    def indices(self, lengths: Lengths) -> list[Tensor]:
        """Return the index tensors of this rank's micro-batches; every rank gets the same number. Collective."""
        return self.split(lengths, self.common_number(lengths))

    @property
    def _bundle_sizes(self) -> list[int]:
        # Small bundles, or single examples, fill micro-batches better, but run a prompt more often.
        return [*(self.tokens_per_micro_batch // parts for parts in (1, 2, 4)), 0] if self.shares_prompts else [0]

    def _bundles(self, lengths: Lengths, images: Sequence[int], most: int, at_least: int = 0) -> list[Bundle]:
        if self.shares_prompts:
            return bundles(lengths, images, most, at_least)
        tokens, samples = lengths.tokens_B.tolist(), lengths.samples_per_example
        return [Bundle([index], max(tokens[index], samples * images[index])) for index in range(len(tokens))]

    def _image_costs(self, lengths: Lengths) -> list[int]:
        """Return the cost of the images of each prompt, in tokens."""
        budget, images_B = self.patch_budget, lengths.images_B
        if budget is None or images_B is None:
            return [0] * len(lengths.prompts_B)
        patches_B = [num_patches(inputs, budget.patch_size) if inputs else 0 for inputs in images_B]
        tokens = self.tokens_per_micro_batch
        # Rounded up, in whole numbers: a full budget of patches costs exactly a full budget of tokens.
        return [min(tokens, -(-patches * tokens // budget.patches)) for patches in patches_B]

    def _fit(self, bundled: list[Bundle], parts: list[list[int]]) -> bool:
        budget = self.tokens_per_micro_batch
        return all(len(part) <= 1 or sum(bundled[place].tokens for place in part) <= budget for part in parts)

    def _packed_number(self, lengths: Lengths) -> int:
        images = self._image_costs(lengths)
        return min(self._number_of(self._bundles(lengths, images, most)) for most in self._bundle_sizes)

    def _number_of(self, bundled: list[Bundle]) -> int:
        tokens = [bundle.tokens for bundle in bundled]
        least = min(len(tokens), math.ceil(sum(tokens) / self.tokens_per_micro_batch))
        return _fewest(least, len(tokens), lambda count: self._fit(bundled, balanced(tokens, count)))

    def _padded_number(self, lengths: Lengths) -> int:
        if not len(lengths.prompts_B):
            return 0
        # Prompts are padded left, responses right: a micro-batch may have the longest prompt and the longest response.
        rows = lengths.samples_per_example * lengths.sequences_per_sample
        width = rows * max(int(lengths.prompts_B.max() + lengths.responses_B.max()), *self._image_costs(lengths))
        return math.ceil(len(lengths.prompts_B) / max(1, self.tokens_per_micro_batch // max(1, width)))


def bundles(lengths: Lengths, images: Sequence[int], most: int, at_least: int = 0) -> list[Bundle]:
    """Bundle examples with the same prompt, which the model runs once per bundle.

    Args:
        lengths: lengths of the examples.
        images: cost of the images of each example's prompt, in tokens. Smaller bundles do not reduce this cost.
        most: largest number of tokens of a bundle with several examples; 0 makes bundles of one example.
        at_least: smallest number of bundles, if there are enough examples; the largest bundles are cut in two.
    """
    prompts = lengths.prompts_B.tolist()
    responses = (lengths.tokens_B - lengths.samples_per_example * lengths.prompts_B).tolist()
    by_prompt: dict[int, list[int]] = {}
    for index, first in enumerate(lengths.first_B.tolist()):
        by_prompt.setdefault(first, []).append(index)

    def bundle(indices: list[int]) -> Bundle:
        prompt, further = prompts[indices[0]], lengths.samples_per_example * len(indices) - 1
        copied = math.ceil(COPY_COST * further * prompt)
        return Bundle(indices, max(prompt + sum(responses[i] for i in indices) + copied, images[indices[0]]))

    def cut(indices: list[int], count: int) -> list[Bundle]:
        # The 1 keeps every part non-empty, also if all responses are empty.
        parts = balanced([1 + responses[index] for index in indices], count)
        return [bundle([indices[place] for place in part]) for part in parts]

    def small_enough(indices: list[int], count: int) -> bool:
        limit = most and max(most, images[indices[0]])
        return all(len(part.indices) == 1 or part.tokens <= limit for part in cut(indices, count))

    found: list[Bundle] = []
    for indices in by_prompt.values():
        count = _fewest(1, len(indices), partial(small_enough, indices))
        found += cut(indices, count)
    while len(found) < min(at_least, len(prompts)):
        largest = max((bundle for bundle in found if len(bundle.indices) > 1), key=lambda bundle: bundle.tokens)
        found.remove(largest)
        found += cut(largest.indices, 2)
    return found


def _fewest(least: int, most: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest sufficient number from `least` to `most`; `most` must be sufficient."""
    return bisect_left(range(most), True, lo=least, key=enough)


def split_by_length(lengths: Lengths, count: int) -> list[Tensor]:
    """Sort examples by length, and cut the order into parts of (almost) equally many examples."""
    order = torch.argsort(lengths.prompts_B + lengths.responses_B, stable=True)
    return list(order.tensor_split(count)) if count else []


def balanced(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of `count` parts of about equally many tokens, the largest part first.

    The parts are `even_parts`. If a cut of the sorted examples has a smaller largest part, as with very few examples,
    the cut is returned. The largest of the even parts never grows with the number of parts, so if some number of parts
    keeps a budget, every larger number does too. Each part is sorted by length.
    """
    shortest_first = sorted(range(len(tokens)), key=lambda index: (-tokens[index], index))[::-1]
    cut = [part.flip(0).tolist() for part in torch.tensor(shortest_first).tensor_split(count)] if count else []

    def size(part: list[int]) -> int:
        return sum(tokens[index] for index in part)

    chosen = min(even_parts(tokens, count), cut, key=lambda candidate: max(map(size, candidate), default=0))
    return sorted(chosen, key=size, reverse=True)
