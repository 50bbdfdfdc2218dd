"""Dealing samples to ranks: order, even shares and mini-batches, for any number of ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.data.experience import Experience
from rl_plugins.stages.dealing import Hand, Table, all_hands, deal, deal_groups, even_shares, even_turns
from rl_plugins.tests.algorithms.simulated_ranks import run_with_table
from rl_plugins.tests.loops import for_each

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


def evened(experience: Experience, mini_batches: int, table: Table) -> Experience:
    """The samples of this rank after all groups are dealt evenly."""
    groups = torch.arange(len(experience)).split(GROUP)
    keys = [(int(experience.groups[group[0]]),) for group in groups]
    hands = all_hands(keys, GROUP, tokens_of(experience), table)
    turns = even_turns(hands, mini_batches, table)
    # `deal_groups`, which has no samples, deals in the same way.
    names = [experience.columns["name"][group[0]] for group in groups]
    dealt = deal(experience, groups, turns, table)
    assert deal_groups(names, turns, table) == dealt.columns["name"][::GROUP]
    return dealt


@for_each("world_size", [1, 2, 3])
def test_deal_sends_chosen_hands_to_ranks_in_turn(world_size: int) -> None:
    wanted = [5, 0, 0, 3, 2, 4]

    def on_rank(table: Table) -> list[str]:
        experience = experience_of(table.rank, world_size)
        groups = torch.arange(len(experience)).split(GROUP)
        keys = [(int(experience.groups[group[0]]),) for group in groups]
        hands = all_hands(keys, GROUP, tokens_of(experience), table)
        assert [hand.key for hand in hands] == [(prompt,) for prompt in range(PROMPTS)]
        chosen = [hands[place] for place in wanted]
        dealt = deal(experience, groups, chosen, table)
        assert dealt.responses[:, 0].tolist() == [10 * int(n[0]) + int(n[-1]) for n in dealt.columns["name"]]
        assert dealt.response_lengths.tolist() == [1 + int(n[0]) % 3 for n in dealt.columns["name"]]
        return list(dealt.columns["name"])

    of_ranks = run_with_table(world_size, on_rank)
    # The hands of all ranks, taken in turn, are the chosen ones in their order.
    prompts = [[name.split("/")[0] for name in names[::GROUP]] for names in of_ranks]
    in_turn = [prompts[place % world_size][place // world_size] for place in range(len(wanted))]
    assert in_turn == [str(prompt) for prompt in wanted]


@for_each("world_size", [2, 3])
def test_even_turns_moves_groups_until_the_tokens_of_ranks_are_even(world_size: int) -> None:
    def on_rank(table: Table) -> Experience:
        return evened(experience_of(table.rank, world_size), 1, table)

    of_ranks = run_with_table(world_size, on_rank)
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
    hands = [Hand((n,), n % ranks, n // ranks, 1, size) for n, size in enumerate(sizes)]
    shares = even_shares(hands, ranks)
    assert [len(share) for share in shares] == [len(sizes) // ranks] * ranks
    assert sorted(hand for share in shares for hand in share) == hands
    before = [sum(sizes[rank::ranks]) for rank in range(ranks)]
    assert max(sum(hand.tokens for hand in share) for share in shares) <= max(before)


def test_even_shares_of_repeated_hands_are_even() -> None:
    (long, short), other = (Hand((n,), 0, n, 1, 10 - 9 * n) for n in range(2)), Hand((2,), 1, 0, 1, 1)
    shares = even_shares([long, long, short, other, short, short], 2)
    assert [len(share) for share in shares] == [3, 3]
    assert [sum(hand.tokens for hand in share) for share in shares] == [12, 12]


def test_even_turns_sends_nothing_between_ranks_that_are_nearly_even() -> None:
    def on_rank(table: Table) -> list[str]:
        def exchange(parcels: list[object]) -> list[object]:
            raise AssertionError("a rank sent a group")

        hands = [Hand((n,), n % 2, n // 2, 1, tokens) for n, tokens in enumerate([50, 49, 50, 51])]
        names = [f"{table.rank}/{n}" for n in range(2)]
        return deal_groups(names, even_turns(hands, 1, table), Table(table.rank, 2, table.gather, exchange))

    assert run_with_table(2, on_rank) == [["0/0", "0/1"], ["1/0", "1/1"]]


def test_even_turns_keeps_the_groups_of_each_mini_batch() -> None:
    def on_rank(table: Table) -> list[set[int]]:
        mine = evened(experience_of(table.rank, 2), 3, table)
        return [set(part.groups.tolist()) for part in mine.chunk(3)]

    first, second = run_with_table(2, on_rank)
    assert [one | other for one, other in zip(first, second, strict=True)] == [{0, 1}, {2, 3}, {4, 5}]
