"""Advantages of turns; a turn is the list of its learned positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from rl_plugins.tests.algorithms.reference.advantages import Pair, group_normalised, totals
from rl_plugins.tests.algorithms.reference.masked import (
    Bools,
    Floats,
    Ints,
    Mask,
    mean,
    only_valid,
    unbiased_variance,
    whiten,
)

Turn = tuple[int, int]


def gigpo(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    turns_BT: Ints,
    states_BT: Ints,
    gamma: float = 0.95,
    turn_weight: float = 1.0,
    scale: str = "group",
    eps: float = 1e-6,
) -> Pair:
    mask_BT = only_valid(response_mask_BT, valid_B)
    episodes_B = group_normalised(totals(token_level_rewards_BT, valid_B), groups_B, valid_B, scale, eps)
    returns: dict[Turn, float] = {}
    members: dict[tuple[int, int], list[Turn]] = defaultdict(list)
    spans = turns_of(mask_BT, turns_BT)
    for sample, positions in spans.items():
        for index, tokens in enumerate(positions):
            later = [sum(float(token_level_rewards_BT[sample, t]) for t in one) for one in positions[index:]]
            returns[sample, index] = sum(gamma**steps * reward for steps, reward in enumerate(later))
            members[int(groups_B[sample]), int(states_BT[sample, tokens[0]])].append((sample, index))
    compared = {}
    for turns in members.values():
        for turn, value in zip(turns, against_others([returns[turn] for turn in turns], scale, eps), strict=True):
            compared[turn] = value
    advantages_BT = np.zeros(mask_BT.shape)
    for sample, positions in spans.items():
        for index, tokens in enumerate(positions):
            advantages_BT[sample, tokens] = episodes_B[sample] + turn_weight * compared[sample, index]
    return advantages_BT, advantages_BT


def mt_grpo(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    turns_BT: Ints,
    outcome_weight: float = 1.0,
    eps: float = 1e-6,
) -> Pair:
    mask_BT = only_valid(response_mask_BT, valid_B)
    outcomes_B = totals(token_level_rewards_BT, valid_B)
    members: dict[tuple[int, int], list[tuple[int, list[int], float]]] = defaultdict(list)
    spans = turns_of(mask_BT, turns_BT)
    for sample, positions in spans.items():
        if positions:
            outcomes_B[sample] = sum(float(token_level_rewards_BT[sample, t]) for t in positions[-1])
        for tokens in positions[:-1]:
            reward = sum(float(token_level_rewards_BT[sample, t]) for t in tokens)
            members[int(groups_B[sample]), int(turns_BT[sample, tokens[0]])].append((sample, tokens, reward))
    outcomes_B = group_normalised(outcomes_B, groups_B, valid_B, "group", eps)
    advantages_BT = np.zeros(mask_BT.shape)
    for turns in members.values():
        values = against_others([reward for _, _, reward in turns], "group", eps)
        for (sample, tokens, _), value in zip(turns, values, strict=True):
            advantages_BT[sample, tokens] = value + outcome_weight * outcomes_B[sample]
    for sample, positions in spans.items():
        advantages_BT[sample, positions[-1]] = outcomes_B[sample]
    return advantages_BT, advantages_BT


def bilevel_gae(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    values_BT: Floats,
    turns_BT: Ints,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_gamma: float = 0.95,
    turn_lam: float = 1.0,
    normalize: bool = True,
) -> Pair:
    mask_BT = only_valid(response_mask_BT, valid_B)
    raw_BT, returns_BT = np.zeros(mask_BT.shape), np.zeros(mask_BT.shape)
    for sample, positions in turns_of(mask_BT, turns_BT).items():
        rewards, values = token_level_rewards_BT[sample], values_BT[sample]
        # The turns first: each has the reward and the value of its last token.
        ends = [tokens[-1] for tokens in positions]
        gain, value = 0.0, 0.0
        for end in reversed(ends):
            gain = float(rewards[end] + turn_gamma * value - values[end]) + turn_gamma * turn_lam * gain
            value = float(values[end])
            raw_BT[sample, end] = gain
        # Then the tokens of each turn, with the return of the turn as the reward of its last token.
        for tokens in positions:
            for here, following in reversed([*pairwise(tokens)]):
                error = float(rewards[here] + gamma * values[following] - values[here])
                raw_BT[sample, here] = error + gamma * lam * raw_BT[sample, following]
        for tokens in positions:
            returns_BT[sample, tokens] = raw_BT[sample, tokens] + values[tokens]
    return whiten(values_BT=raw_BT, mask_BT=mask_BT) if normalize else raw_BT, returns_BT


def turns_of(mask_BT: Bools, turns_BT: Ints) -> Mapping[int, Sequence[list[int]]]:
    """Return the positions of each turn of each sample with a position."""
    found = {}
    for sample, (mask_T, turns_T) in enumerate(zip(mask_BT, turns_BT, strict=True)):
        by_number: dict[int, list[int]] = defaultdict(list)
        for t in np.flatnonzero(mask_T):
            by_number[int(turns_T[t])].append(int(t))
        if by_number:
            found[sample] = [by_number[number] for number in sorted(by_number)]
    return found


def against_others(values: list[float], scale: str, eps: float) -> list[float]:
    """Return the values minus their mean, divided by their deviation; 0 for a single value and for equal values."""
    if len(values) == 1 or max(values) == min(values):
        return [0.0] * len(values)
    divisor = unbiased_variance(values) ** 0.5 + eps if scale == "group" else 1.0
    return [(value - mean(values)) / divisor for value in values]
