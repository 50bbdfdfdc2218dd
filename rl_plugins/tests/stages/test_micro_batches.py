"""Micro-batches: every sample once, equally many on every rank, and within the budget wherever a sample fits it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.stages.micro_batches import Cutter, Lengths, balanced

lengths = st.tuples(st.integers(1, 40), st.integers(0, 60))


def cut(ranks: list[list[tuple[int, int]]], budget: int, *, packing: bool, samples: int = 1) -> list[list[Tensor]]:
    """The micro-batches of every rank."""
    columns = [torch.tensor(rank).T for rank in ranks]
    parts = [Lengths(prompts, responses, samples * (prompts + responses), samples) for prompts, responses in columns]
    wanted: list[Tensor] = []

    def collect(values: Tensor) -> Tensor:
        wanted.append(values)
        return values

    for part in parts:
        Cutter(budget, packing, collect).indices(part)
    largest = torch.stack(wanted).amax(dim=0)
    return [Cutter(budget, packing, lambda _: largest).indices(part) for part in parts]


@settings(deadline=None)
@given(st.integers(1, 24), st.integers(1, 400), st.booleans(), st.data())
def test_every_sample_once_and_as_many_micro_batches_on_every_rank(
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
    parts = [[tokens[i] for i in part.tolist()] for part in balanced(torch.tensor(tokens), count)]
    assert sorted(length for part in parts for length in part) == sorted(tokens)
    sizes = [sum(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    sorted_cut = [int(part.sum()) for part in torch.tensor(sorted(tokens)).tensor_split(count)]
    assert sizes[0] <= max(sorted_cut)
    # What list scheduling promises: less than a mean part and one more example.
    assert sizes[0] <= sum(tokens) / count + (1 - 1 / count) * max(tokens) + 1e-9
    assert all(part == sorted(part, reverse=True) for part in parts)


def test_a_generous_budget_needs_one_micro_batch_and_a_tiny_one_one_per_sample() -> None:
    rank = [(3, 5), (2, 9), (4, 1)]
    assert len(cut([rank], 3 * 13, packing=False)[0]) == 1
    assert len(cut([rank], 3 * 13 - 1, packing=False)[0]) == 2
    assert len(cut([rank], 24, packing=True)[0]) == 1
    assert len(cut([rank], 23, packing=True)[0]) == 2
    for packing in (True, False):
        assert [len(part) for part in cut([rank], 1, packing=packing)[0]] == [1, 1, 1]


@pytest.mark.parametrize(("packing", "whole"), [(True, 2 * 24), (False, 2 * 3 * 13)])
def test_all_samples_of_an_example_count(packing: bool, whole: int) -> None:
    rank = [(3, 5), (2, 9), (4, 1)]
    assert len(cut([rank], whole, packing=packing, samples=2)[0]) == 1
    assert len(cut([rank], whole - 1, packing=packing, samples=2)[0]) == 2


def test_without_packing_samples_of_similar_length_share_a_micro_batch() -> None:
    parts = cut([[(1, 50), (1, 2), (1, 49), (1, 1)]], 2 * 51, packing=False)[0]
    assert [part.tolist() for part in parts] == [[3, 1], [2, 0]]


def test_with_packing_a_long_sample_meets_short_ones() -> None:
    parts = cut([[(1, 50), (1, 2), (1, 49), (1, 1)]], 54, packing=True)[0]
    assert [part.tolist() for part in parts] == [[0, 3], [2, 1]]
    # Few samples of which the longest come in a pair: sorted, they cut evenly.
    parts = balanced(torch.tensor([3, 3, 2, 2, 2]), 2)
    assert [part.tolist() for part in parts] == [[2, 3, 4], [0, 1]]
