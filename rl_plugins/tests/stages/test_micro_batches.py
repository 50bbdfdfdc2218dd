"""Micro-batches: every sample once, equally many on every rank, and within the budget wherever a sample fits it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.stages.micro_batches import micro_batch_indices

lengths = st.tuples(st.integers(1, 40), st.integers(0, 60))


def cut(ranks: list[list[tuple[int, int]]], budget: int) -> list[list[Tensor]]:
    """The micro-batches of every rank."""
    parts = [torch.tensor(rank).T for rank in ranks]
    wanted: list[Tensor] = []

    def collect(values: Tensor) -> Tensor:
        wanted.append(values)
        return values

    for prompts, responses in parts:
        micro_batch_indices(prompts, responses, budget, collect)
    largest = torch.stack(wanted).amax(dim=0)
    return [micro_batch_indices(prompts, responses, budget, lambda _: largest) for prompts, responses in parts]


@settings(deadline=None)
@given(st.integers(1, 24), st.integers(1, 400), st.data())
def test_every_sample_once_and_as_many_micro_batches_on_every_rank(size: int, budget: int, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.lists(lengths, min_size=size, max_size=size), min_size=1, max_size=3))
    micro_batches = cut(ranks, budget)
    assert len({len(rank) for rank in micro_batches}) == 1
    for rank, parts in zip(ranks, micro_batches, strict=True):
        assert sorted(torch.cat(parts).tolist()) == list(range(size))
        assert all(len(part) > 0 for part in parts)
        # A rank whose longest prompt and response fit together never exceeds the budget.
        fits = max(prompt for prompt, _ in rank) + max(response for _, response in rank) <= budget
        for part in parts:
            chosen = [rank[i] for i in part.tolist()]
            padded = len(chosen) * (max(p for p, _ in chosen) + max(r for _, r in chosen))
            assert padded <= budget or (not fits and len(chosen) == 1)


def test_a_generous_budget_needs_one_micro_batch_and_a_tiny_one_one_per_sample() -> None:
    rank = [(3, 5), (2, 9), (4, 1)]
    assert len(cut([rank], 3 * 13)[0]) == 1
    assert len(cut([rank], 3 * 13 - 1)[0]) == 2
    assert [len(part) for part in cut([rank], 1)[0]] == [1, 1, 1]


def test_samples_of_similar_length_share_a_micro_batch() -> None:
    parts = cut([[(1, 50), (1, 2), (1, 49), (1, 1)]], 2 * 51)[0]
    assert [part.tolist() for part in parts] == [[3, 1], [2, 0]]
