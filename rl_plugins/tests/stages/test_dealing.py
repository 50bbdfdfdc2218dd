"""Samples that change ranks arrive where they belong, in the order of the prompts, for any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_plugins.data.experience import Experience
from rl_plugins.stages.dealing import Table, all_hands, deal
from rl_plugins.tests.algorithms.simulated_ranks import exchange_on_ranks

GROUP = 2
PROMPTS = 6


def experience_of(rank: int, world_size: int) -> Experience:
    """This rank's share of six prompts, two samples each, told apart by their tokens."""
    prompts = [prompt for prompt in range(PROMPTS) if prompt % world_size == rank]
    rows = [(prompt, sample) for prompt in prompts for sample in range(GROUP)]
    return Experience.from_samples(
        prompt_ids=[[prompt] for prompt, _ in rows],
        responses=[[10 * prompt + sample] * (1 + prompt % 3) for prompt, sample in rows],
        rollout_log_probs=[[0.0] * (1 + prompt % 3) for prompt, _ in rows],
        groups=[prompt for prompt, _ in rows],
        policy_version=0,
        columns={"name": [f"{prompt}/{sample}" for prompt, sample in rows]},
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_chosen_hands_are_dealt_in_turn(world_size: int) -> None:
    wanted = [5, 0, 0, 3, 2, 4]

    def on_rank(rank: int, exchange: Any) -> list[str]:
        experience = experience_of(rank, world_size)
        groups = torch.arange(len(experience)).split(GROUP)
        keys = [(int(experience.groups[group[0]]),) for group in groups]
        table = Table(rank, world_size, exchange)
        hands = all_hands(keys, table)
        assert [hand.key for hand in hands] == [(prompt,) for prompt in range(PROMPTS)]
        chosen = [hands[place] for place in wanted]
        dealt = deal(experience, groups, chosen, table)
        assert dealt.responses[:, 0].tolist() == [10 * int(n[0]) + int(n[-1]) for n in dealt.columns["name"]]
        assert dealt.response_lengths.tolist() == [1 + int(n[0]) % 3 for n in dealt.columns["name"]]
        return list(dealt.columns["name"])

    everyone = exchange_on_ranks(world_size, on_rank)
    # The hands of all ranks, taken in turn, are the chosen ones in their order.
    prompts = [[name.split("/")[0] for name in names[::GROUP]] for names in everyone]
    in_turn = [prompts[place % world_size][place // world_size] for place in range(len(wanted))]
    assert in_turn == [str(prompt) for prompt in wanted]
