"""Distribution of samples to ranks: order, even shares and mini-batches, for any number of ranks."""

from __future__ import annotations

from typing import TypeVar

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from rl_plugins.algorithms.filtering import Resampling
from rl_plugins.data.experience import Experience
from rl_plugins.ranks import Ranks
from rl_plugins.stages.balancing import (
    SampleSet,
    even_order,
    even_shares,
    gather_sets,
    redistribute,
    redistribute_groups,
    resample_over_ranks,
)
from rl_plugins.tests.algorithms.simulated_ranks import SimulatedRanks, run_with_ranks
from rl_plugins.tests.loops import for_each

T = TypeVar("T")

GROUP = 2
PROMPTS = 6


def experience_of(rank: int, world_size: int) -> Experience:
    """The share of a rank of six prompts, with two samples each. The token of a sample is 10 * prompt + sample."""
    prompts = [prompt for prompt in range(PROMPTS) if prompt % world_size == rank]
    rows = [(prompt, sample) for prompt in prompts for sample in range(GROUP)]
    return Experience.from_samples(
        prompt_ids=[[prompt] for prompt, _ in rows],
        responses=[[10 * prompt + sample] * (1 + prompt % 3) for prompt, sample in rows],
        rollout_log_probs=[[0.0] * (1 + prompt % 3) for prompt, _ in rows],
        groups=[prompt for prompt, _ in rows],
        policy_versions=0,
        columns={"name": [f"{prompt}/{sample}" for prompt, sample in rows]},
    )


def tokens_of(experience: Experience) -> list[int]:
    """Number of tokens of each group."""
    return [int(n) for n in experience.sequence_lengths.view(-1, GROUP).sum(dim=1)]


def evened(experience: Experience, mini_batches: int, ranks: Ranks) -> Experience:
    """The samples of this rank after all groups are distributed evenly."""
    groups = torch.arange(len(experience)).split(GROUP)
    keys = [(int(experience.groups[group[0]]),) for group in groups]
    sets = gather_sets(keys, GROUP, tokens_of(experience), ranks)
    turns = even_order(sets, mini_batches, ranks.world_size)
    # `redistribute_groups` has no samples, and gives ranks the same groups.
    names = [experience.columns["name"][group[0]] for group in groups]
    dealt = redistribute(experience, groups, turns, ranks)
    assert redistribute_groups(names, turns, ranks) == dealt.columns["name"][::GROUP]
    return dealt


@for_each("world_size", [1, 2, 3])
def test_redistribute_sends_chosen_sets_to_ranks_in_turn(world_size: int) -> None:
    wanted = [5, 0, 0, 3, 2, 4]

    def on_rank(ranks: Ranks) -> list[str]:
        experience = experience_of(ranks.rank, world_size)
        groups = torch.arange(len(experience)).split(GROUP)
        keys = [(int(experience.groups[group[0]]),) for group in groups]
        sets = gather_sets(keys, GROUP, tokens_of(experience), ranks)
        assert [one.key for one in sets] == [(prompt,) for prompt in range(PROMPTS)]
        chosen = [sets[place] for place in wanted]
        dealt = redistribute(experience, groups, chosen, ranks)
        assert dealt.responses[:, 0].tolist() == [10 * int(n[0]) + int(n[-1]) for n in dealt.columns["name"]]
        assert dealt.response_lengths.tolist() == [1 + int(n[0]) % 3 for n in dealt.columns["name"]]
        return list(dealt.columns["name"])

    of_ranks = run_with_ranks(world_size, on_rank)
    # The sets of all ranks, taken in turn, are the chosen sets in order.
    prompts = [[name.split("/")[0] for name in names[::GROUP]] for names in of_ranks]
    in_turn = [prompts[place % world_size][place // world_size] for place in range(len(wanted))]
    assert in_turn == [str(prompt) for prompt in wanted]


@for_each("world_size", [2, 3])
def test_even_order_moves_groups_until_the_tokens_of_ranks_are_even(world_size: int) -> None:
    def on_rank(ranks: Ranks) -> Experience:
        return evened(experience_of(ranks.rank, world_size), 1, ranks)

    of_ranks = run_with_ranks(world_size, on_rank)
    assert [len(mine) for mine in of_ranks] == [GROUP * PROMPTS // world_size] * world_size
    names = [mine.columns["name"] for mine in of_ranks]
    assert sorted(name for mine in names for name in mine) == [f"{p}/{s}" for p in range(PROMPTS) for s in range(GROUP)]
    for mine in names:
        assert all(first[:-1] == second[:-1] for first, second in zip(mine[::2], mine[1::2], strict=True))
        assert list(mine) == sorted(mine)
    tokens = [int(mine.sequence_lengths.sum()) for mine in of_ranks]
    assert max(tokens) - min(tokens) <= 2


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 99), min_size=4, max_size=24))
def test_even_shares_have_equal_counts_and_no_larger_maximum_of_tokens(ranks: int, sizes: list[int]) -> None:
    del sizes[len(sizes) // ranks * ranks :]
    sets = [SampleSet((n,), n % ranks, n // ranks, 1, size) for n, size in enumerate(sizes)]
    shares = even_shares(sets, ranks)
    assert [len(share) for share in shares] == [len(sizes) // ranks] * ranks
    assert sorted(one for share in shares for one in share) == sets
    before = [sum(sizes[rank::ranks]) for rank in range(ranks)]
    assert max(sum(one.tokens for one in share) for share in shares) <= max(before)


def test_even_shares_of_repeated_sets_are_even() -> None:
    (long, short), other = (SampleSet((n,), 0, n, 1, 10 - 9 * n) for n in range(2)), SampleSet((2,), 1, 0, 1, 1)
    shares = even_shares([long, long, short, other, short, short], 2)
    assert [len(share) for share in shares] == [3, 3]
    assert [sum(one.tokens for one in share) for share in shares] == [12, 12]


class NoExchange(SimulatedRanks):
    """A rank that must not send."""

    @override
    def exchange(self, parcels: list[T]) -> list[T]:
        raise AssertionError("a rank sent a group")


def test_even_order_sends_nothing_between_ranks_that_are_nearly_even() -> None:
    def on_rank(ranks: SimulatedRanks) -> list[str]:
        sets = [SampleSet((n,), n % 2, n // 2, 1, tokens) for n, tokens in enumerate([50, 49, 50, 51])]
        names = [f"{ranks.rank}/{n}" for n in range(2)]
        return redistribute_groups(
            names, even_order(sets, 1, 2), NoExchange(ranks.rank, 2, all_gather=ranks.all_gather)
        )

    assert run_with_ranks(2, on_rank) == [["0/0", "0/1"], ["1/0", "1/1"]]


def test_even_order_keeps_the_groups_of_each_mini_batch() -> None:
    def on_rank(ranks: Ranks) -> list[set[int]]:
        mine = evened(experience_of(ranks.rank, 2), 3, ranks)
        return [set(part.groups.tolist()) for part in mine.chunk(3)]

    first, second = run_with_ranks(2, on_rank)
    assert [one | other for one, other in zip(first, second, strict=True)] == [{0, 1}, {2, 3}, {4, 5}]


def test_resample_over_ranks_keeps_the_samples_of_a_step_whose_rewards_all_failed() -> None:
    samples = experience_of(0, 1)
    samples.scores, samples.valid = torch.zeros(len(samples)), torch.zeros(len(samples), dtype=torch.bool)
    assert resample_over_ranks(samples, Resampling(), 1, 1, seed=0, ranks=Ranks()) is samples
