"""Micro-batches: each sample once, an equal number on all ranks, and within the budget if a sample fits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.data.experience import Experience
from rl_plugins.stages.micro_batches import Cutter, Lengths, PatchBudget, balanced, bundles, split_by_length

lengths = st.tuples(st.integers(1, 40), st.integers(0, 60))


def cut(ranks: list[list[tuple[int, int]]], budget: int, *, packing: bool, samples: int = 1) -> list[list[Tensor]]:
    """The micro-batches of each rank. No two examples share a prompt."""
    parts = []
    for prompts, responses in (torch.tensor(rank).T for rank in ranks):
        tokens, own = samples * (prompts + responses), torch.arange(len(prompts))
        parts.append(Lengths(prompts, responses, tokens, own, samples))
    return cut_each(parts, budget, packing=packing)


def cut_each(parts: list[Lengths], budget: int, *, packing: bool, together: bool = False) -> list[list[Tensor]]:
    wanted: list[Tensor] = []

    def collect(values: Tensor) -> Tensor:
        wanted.append(values)
        return values

    for part in parts:
        Cutter(budget, packing, together, collect).indices(part)
    largest = torch.stack(wanted).amax(dim=0)
    return [Cutter(budget, packing, together, lambda _: largest).indices(part) for part in parts]


@settings(deadline=None)
@given(st.integers(1, 24), st.integers(1, 400), st.booleans(), st.data())
def test_cutter_gives_each_sample_once_and_equal_counts_of_micro_batches_on_all_ranks(
    size: int, budget: int, packing: bool, data: st.DataObject
) -> None:
    ranks = data.draw(st.lists(st.lists(lengths, min_size=size, max_size=size), min_size=1, max_size=3))
    micro_batches = cut(ranks, budget, packing=packing)
    assert len({len(rank) for rank in micro_batches}) == 1
    for rank, parts in zip(ranks, micro_batches, strict=True):
        assert sorted(torch.cat(parts).tolist()) == list(range(size))
        assert all(len(part) > 0 for part in parts)
        # Padded: a rank whose longest prompt and response fit together never exceeds the budget.
        fits = max(prompt for prompt, _ in rank) + max(response for _, response in rank) <= budget
        for part in parts:
            chosen = [rank[i] for i in part.tolist()]
            real = sum(prompt + response for prompt, response in chosen)
            padded = len(chosen) * (max(p for p, _ in chosen) + max(r for _, r in chosen))
            if packing:
                assert real <= budget or len(chosen) == 1
            else:
                assert padded <= budget or (not fits and len(chosen) == 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 12))
def test_balanced_parts_are_no_worse_than_a_sorted_cut(tokens: list[int], count: int) -> None:
    parts = [[tokens[i] for i in part] for part in balanced(tokens, count)]
    assert sorted(length for part in parts for length in part) == sorted(tokens)
    sizes = [sum(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    sorted_cut = [int(part.sum()) for part in torch.tensor(sorted(tokens)).tensor_split(count)]
    assert sizes[0] <= max(sorted_cut)
    # The bound of list scheduling: less than a mean part and one more example.
    assert sizes[0] <= sum(tokens) / count + (1 - 1 / count) * max(tokens) + 1e-9
    assert all(part == sorted(part, reverse=True) for part in parts)


def test_cutter_fills_the_budget_of_tokens() -> None:
    rank = [(3, 5), (2, 9), (4, 1)]
    assert len(cut([rank], 3 * 13, packing=False)[0]) == 1
    assert len(cut([rank], 3 * 13 - 1, packing=False)[0]) == 2
    assert len(cut([rank], 24, packing=True)[0]) == 1
    assert len(cut([rank], 23, packing=True)[0]) == 2
    for packing in (True, False):
        assert [len(part) for part in cut([rank], 1, packing=packing)[0]] == [1, 1, 1]


@pytest.mark.parametrize(("packing", "whole"), [(True, 2 * 24), (False, 2 * 3 * 13)])
def test_cutter_counts_all_samples_of_an_example(packing: bool, whole: int) -> None:
    rank = [(3, 5), (2, 9), (4, 1)]
    assert len(cut([rank], whole, packing=packing, samples=2)[0]) == 1
    assert len(cut([rank], whole - 1, packing=packing, samples=2)[0]) == 2


def test_cutter_without_packing_groups_samples_of_similar_length() -> None:
    parts = cut([[(1, 50), (1, 2), (1, 49), (1, 1)]], 2 * 51, packing=False)[0]
    assert [part.tolist() for part in parts] == [[3, 1], [2, 0]]


def test_cutter_with_packing_mixes_long_and_short_samples() -> None:
    parts = cut([[(1, 50), (1, 2), (1, 49), (1, 1)]], 54, packing=True)[0]
    assert [part.tolist() for part in parts] == [[0, 3], [2, 1]]
    # The two longest samples are equal: a cut of the sorted samples is even.
    assert balanced([3, 3, 2, 2, 2], 2) == [[2, 3, 4], [0, 1]]


groups = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=8)), min_size=1, max_size=6
)


def lengths_of(groups: list[tuple[int, list[int]]]) -> Lengths:
    """Return the lengths of samples. Each group has the length of a prompt and the lengths of its responses."""
    prompts = torch.tensor([prompt for prompt, responses in groups for _ in responses])
    responses = torch.tensor([length for _, responses in groups for length in responses])
    sizes = torch.tensor([len(responses) for _, responses in groups])
    return Lengths(prompts, responses, prompts + responses, (sizes.cumsum(0) - sizes).repeat_interleave(sizes))


def first(lengths: Lengths, size: int) -> Lengths:
    own = slice(size)
    return Lengths(lengths.prompts_B[own], lengths.responses_B[own], lengths.tokens_B[own], lengths.first_B[own])


def run(lengths: Lengths, part: Tensor) -> int:
    """Return the tokens of a micro-batch with shared prompts."""
    firsts = {int(lengths.first_B[i]): int(lengths.prompts_B[i]) for i in part.tolist()}
    return sum(firsts.values()) + int(lengths.responses_B[part].sum())


@settings(deadline=None)
@given(st.lists(groups, min_size=1, max_size=3), st.integers(1, 400))
def test_cutter_counts_shared_prompts_once(ranks: list[list[tuple[int, list[int]]]], budget: int) -> None:
    # In training, ranks have equally many samples.
    size = min(sum(len(responses) for _, responses in rank) for rank in ranks)
    parts = [first(lengths_of(rank), size) for rank in ranks]
    shared, apart = (cut_each(parts, budget, packing=True, together=together) for together in (True, False))
    assert len({len(rank) for rank in shared}) == 1
    assert len(shared[0]) <= len(apart[0])
    for part, micro_batches in zip(parts, shared, strict=True):
        assert sorted(torch.cat(micro_batches).tolist()) == list(range(size))
        assert all(len(one) > 0 and (len(one) == 1 or run(part, one) <= budget) for one in micro_batches)


def test_cutter_keeps_samples_of_a_prompt_together_within_the_budget() -> None:
    lengths = lengths_of([(10, [5, 5, 5, 5]), (10, [5, 5, 5, 5])])
    # Four responses, their prompt, and three eighths of the prompt, rounded up.
    (parts,) = cut_each([lengths], 34, packing=True, together=True)
    assert [sorted(part.tolist()) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Without sharing, two samples fit.
    assert len(cut_each([lengths], 34, packing=True)[0]) == 4
    (parts,) = cut_each([lengths], 23, packing=True, together=True)
    assert [run(lengths, part) for part in parts] == [20, 20, 20, 20]
    # A rank with fewer micro-batches than another one cuts the largest bundle, not all bundles.
    short = lengths_of([(4, [1, 1, 1, 1]), (2, [1, 1, 1, 1])])
    parts = cut_each([lengths, short], 23, packing=True, together=True)[1]
    assert sorted(sorted(i // 4 for i in part.tolist()) for part in parts) == [[0, 0], [0, 0], [1, 1], [1, 1]]
    # Whole bundles would leave much of the budget unused, so bundles are cut: three micro-batches, not four.
    uneven = lengths_of([(2, [9, 9, 9])] * 4)
    assert len(cut_each([uneven], 43, packing=True, together=True)[0]) == 3


def with_patches(groups: list[tuple[int, list[int]]], patches: list[int]) -> Lengths:
    """Return the lengths of samples. Each group has a number of patches."""
    of_group = [{"pixel_values": torch.zeros(count, 12)} if count else None for count in patches]
    images = [inputs for inputs, (_, responses) in zip(of_group, groups, strict=True) for _ in responses]
    return replace(lengths_of(groups), images_B=images)


@settings(deadline=None)
@given(groups, st.integers(1, 400), st.integers(1, 90), st.sampled_from(["padded", "packed", "together"]), st.data())
def test_cutter_bounds_the_patches_of_a_micro_batch(
    groups: list[tuple[int, list[int]]], budget: int, patches: int, layout: str, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(0, 100), min_size=len(groups), max_size=len(groups)))
    lengths = with_patches(groups, counts)
    cutter = Cutter(budget, layout != "padded", layout == "together", lambda largest: largest, PatchBudget(patches, 1))
    parts = cutter.indices(lengths)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths.prompts_B)))
    of_sample = [count for count, (_, responses) in zip(counts, groups, strict=True) for _ in responses]
    for part in parts:
        seen = lengths.first_B[part].unique() if layout == "together" else part
        assert sum(of_sample[index] for index in seen.tolist()) <= patches or len(seen) == 1
        tokens = {"together": run(lengths, part), "packed": int(lengths.tokens_B[part].sum()), "padded": 0}
        assert tokens[layout] <= budget or len(part) == 1


def test_cutter_without_images_ignores_the_patch_budget() -> None:
    lengths = with_patches([(3, [5, 2]), (2, [9])], [0, 0])
    plain = Cutter(20, True, True, lambda largest: largest)
    bounded = replace(plain, patch_budget=PatchBudget(1, 1))
    assert [part.tolist() for part in bounded.indices(lengths)] == [part.tolist() for part in plain.indices(lengths)]


def test_cutter_keeps_the_samples_of_a_prompt_beyond_the_patch_budget_together() -> None:
    lengths = with_patches([(4, [1] * 8), (4, [1] * 8)], [100, 20])
    cutter = Cutter(400, True, True, lambda largest: largest, PatchBudget(50, 1))
    assert [sorted(part.tolist()) for part in cutter.indices(lengths)] == [[*range(8)], [*range(8, 16)]]


def test_lengths_of_pairs_count_the_prompt_once() -> None:
    samples = Experience.from_responses([[1, 2], [3], [1, 2], [3]], [[4], [5, 5], [6, 6, 6], [7]], pad_token_id=0)
    lengths = Lengths.of_examples(samples, torch.tensor([[0, 2], [1, 3]]))
    assert lengths.prompts_B.tolist() == [2, 1] and lengths.responses_B.tolist() == [3, 2]
    assert lengths.tokens_B.tolist() == [8, 5] and lengths.first_B.tolist() == [0, 1]
    # Attention keeps the keys of both samples: an eighth of the prompt once more, rounded up.
    assert [bundle.tokens for bundle in bundles(lengths, [0, 0], 100)] == [7, 5]
    assert Lengths.of(samples).first_B.tolist() == [0, 1, 0, 1]
    assert len(Lengths.of(samples[:0]).first_B) == 0


def test_split_by_length_of_no_examples_has_no_parts() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    lengths: Any = SimpleNamespace(prompts_B=none, responses_B=none)
    assert split_by_length(lengths, 0) == []
