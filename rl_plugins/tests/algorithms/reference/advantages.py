"""Advantages and returns; both are 0 where the mask is 0 and for invalid samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rl_plugins.tests.algorithms.reference.masked import (
    Bools,
    Floats,
    Ints,
    Mask,
    length,
    mean,
    only_valid,
    positions,
    unbiased_variance,
    whiten,
)

Pair = tuple[Floats, Floats]


def grpo(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    scale: str = "group",
    eps: float = 1e-6,
) -> Pair:
    rewards_B = totals(token_level_rewards_BT, valid_B)
    advantages_B = group_normalised(rewards_B, groups_B, valid_B, scale, eps)
    return same_on_every_token(advantages_B, only_valid(response_mask_BT, valid_B))


def grpo_passk(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    normalize: bool = True,
    eps: float = 1e-6,
) -> Pair:
    rewards_B = totals(token_level_rewards_BT, valid_B)
    advantages_B = np.zeros(len(rewards_B))
    for members in groups_of(groups_B, valid_B):
        if len(members) < 2:
            raise ValueError("pass@k needs two valid samples in a group")
        ordered = sorted(members, key=lambda i: float(rewards_B[i]), reverse=True)
        gap = float(rewards_B[ordered[0]] - rewards_B[ordered[1]])
        if normalize:
            gap /= math.sqrt(unbiased_variance([float(rewards_B[i]) for i in members])) + eps
        advantages_B[ordered[0]] = gap
    return same_on_every_token(advantages_B, only_valid(response_mask_BT, valid_B))


def rloo(*, token_level_rewards_BT: Floats, response_mask_BT: Mask, groups_B: Ints, valid_B: Bools) -> Pair:
    rewards_B = totals(token_level_rewards_BT, valid_B)
    advantages_B = np.zeros(len(rewards_B))
    for members in groups_of(groups_B, valid_B):
        for i in members:
            advantages_B[i] = rewards_B[i] - mean([float(rewards_B[j]) for j in members if j != i])
    return same_on_every_token(advantages_B, only_valid(response_mask_BT, valid_B))


def opo(*, token_level_rewards_BT: Floats, response_mask_BT: Mask, groups_B: Ints, valid_B: Bools) -> Pair:
    rewards_B = totals(token_level_rewards_BT, valid_B)
    advantages_B = np.zeros(len(rewards_B))
    for members in groups_of(groups_B, valid_B):
        tokens = sum(length(response_mask_BT[i]) for i in members)
        weighted = math.fsum(length(response_mask_BT[i]) * float(rewards_B[i]) for i in members)
        baseline = weighted / tokens if len(members) > 1 and tokens > 0 else 0.0
        for i in members:
            advantages_B[i] = rewards_B[i] - baseline
    return same_on_every_token(advantages_B, only_valid(response_mask_BT, valid_B))


def gpg(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    norm: float = 1.0,
) -> Pair:
    """The factor counts the valid samples of the whole batch given."""
    rewards_B = totals(token_level_rewards_BT, valid_B)
    samples = [i for i in range(len(rewards_B)) if valid_B[i]]
    alpha = len(samples) / max(1, sum(1 for i in samples if rewards_B[i] != 0))
    centred_B = group_normalised(rewards_B, groups_B, valid_B, "none", 0.0)
    return same_on_every_token(alpha * centred_B / norm, only_valid(response_mask_BT, valid_B))


def best_of_n(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    keep: int | None = 1,
    above: float | None = None,
) -> Pair:
    """1 for each kept sample, times the number of sampled tokens for each kept token."""
    rewards_B = totals(token_level_rewards_BT, valid_B)
    learned_BT = only_valid(response_mask_BT, valid_B)
    advantages_B = np.zeros(len(rewards_B))
    for members in groups_of(groups_B, valid_B):
        left = list(members)
        while left and (keep is None or len(members) - len(left) < keep):
            best = max(left, key=lambda i: float(rewards_B[i]))
            left.remove(best)
            advantages_B[best] = 1.0 if above is None or rewards_B[best] > above else 0.0
    kept = sum(length(learned_BT[i]) for i in range(len(advantages_B)) if advantages_B[i])
    sampled = sum(length(row) for row in learned_BT)
    return same_on_every_token(advantages_B * sampled / max(kept, 1), learned_BT)


def max_rl(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    eps: float = 1e-6,
) -> Pair:
    """(R - mean) / (mean + eps), with the group's mean; a group of one gets 0."""
    rewards_B = totals(token_level_rewards_BT, valid_B)
    advantages_B = np.zeros(len(rewards_B))
    for members in groups_of(groups_B, valid_B):
        average = mean([float(rewards_B[i]) for i in members])
        for i in members:
            advantages_B[i] = (rewards_B[i] - average) / (average + eps)
    return same_on_every_token(advantages_B, only_valid(response_mask_BT, valid_B))


def gdpo(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    component_rewards_BK: Floats | None = None,
    weights: Sequence[float] | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
) -> Pair:
    if component_rewards_BK is None:
        columns = [totals(token_level_rewards_BT, valid_B)]
        factors: Sequence[float] = [1.0]
    else:
        columns = [component_rewards_BK[:, k] for k in range(component_rewards_BK.shape[1])]
        factors = [1.0] * len(columns) if weights is None else weights
    summed_B = np.zeros(len(valid_B))
    for factor, column_B in zip(factors, columns, strict=True):
        summed_B += factor * group_normalised(column_B, groups_B, valid_B, "group" if normalize else "none", eps)
    return whitened_on_tokens(summed_B, only_valid(response_mask_BT, valid_B))


def reinforce_plus_plus(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    gamma: float = 1.0,
) -> Pair:
    mask_BT = only_valid(response_mask_BT, valid_B)
    samples, width = mask_BT.shape
    returns_BT = np.zeros(mask_BT.shape)
    for i in range(samples):
        carried = 0.0
        for t in reversed(range(width)):
            if mask_BT[i, t]:
                carried = float(token_level_rewards_BT[i, t]) + gamma * carried
                returns_BT[i, t] = carried
    return whiten(values_BT=returns_BT, mask_BT=mask_BT), returns_BT


def reinforce_plus_plus_baseline(
    *, token_level_rewards_BT: Floats, response_mask_BT: Mask, groups_B: Ints, valid_B: Bools
) -> Pair:
    rewards_B = totals(token_level_rewards_BT, valid_B)
    centred_B = group_normalised(rewards_B, groups_B, valid_B, "none", 0.0)
    return whitened_on_tokens(centred_B, only_valid(response_mask_BT, valid_B))


def remax(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    baseline_rewards_B: Floats,
) -> Pair:
    mask_BT = only_valid(response_mask_BT, valid_B)
    returns_BT = rewards_to_go(token_level_rewards_BT, mask_BT)
    advantages_BT = np.zeros(mask_BT.shape)
    for i, t in positions(mask_BT):
        advantages_BT[i, t] = returns_BT[i, t] - baseline_rewards_B[i]
    return advantages_BT, returns_BT


def reverse_kl(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    old_log_probs_BT: Floats,
    teacher_log_probs_BT: Floats,
    coefficient: float = 1.0,
    bound: float | None = 10.0,
    reward_weight: float = 0.0,
) -> Pair:
    mask_BT = only_valid(response_mask_BT, valid_B)
    of_task_BT, _ = grpo(
        token_level_rewards_BT=token_level_rewards_BT,
        response_mask_BT=response_mask_BT,
        groups_B=groups_B,
        valid_B=valid_B,
    )
    advantages_BT = np.zeros(mask_BT.shape)
    for i, t in positions(mask_BT):
        nats = old_log_probs_BT[i, t] - teacher_log_probs_BT[i, t]
        if bound is not None:
            nats = min(max(nats, -bound), bound)
        advantages_BT[i, t] = reward_weight * of_task_BT[i, t] - coefficient * nats
    return advantages_BT, advantages_BT


def gae(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    values_BT: Floats,
    gamma: float = 1.0,
    lam: float = 1.0,
    normalize: bool = True,
) -> Pair:
    mask_BT = only_valid(response_mask_BT, valid_B)
    samples, width = mask_BT.shape
    raw_BT, returns_BT = np.zeros(mask_BT.shape), np.zeros(mask_BT.shape)
    for i in range(samples):
        next_value, next_advantage = 0.0, 0.0
        for t in reversed(range(width)):
            if not mask_BT[i, t]:
                continue
            value = float(values_BT[i, t])
            delta = float(token_level_rewards_BT[i, t]) + gamma * next_value - value
            next_advantage = delta + gamma * lam * next_advantage
            next_value = value
            raw_BT[i, t] = next_advantage
            returns_BT[i, t] = next_advantage + value
    return whiten(values_BT=raw_BT, mask_BT=mask_BT) if normalize else raw_BT, returns_BT


def optimal_token_baseline(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    old_log_probs_BT: Floats,
    sum_pi_squared_BT: Floats,
    rollout_weights_BT: Floats | None = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> Pair:
    mask_BT = only_valid(response_mask_BT, valid_B)
    samples, width = mask_BT.shape
    returns_BT = rewards_to_go(token_level_rewards_BT, mask_BT)
    energy_BT = score_energy(mask_BT, old_log_probs_BT, sum_pi_squared_BT, rollout_weights_BT)
    summed_BT = np.zeros(mask_BT.shape)
    for i in range(samples):
        running = 0.0
        for t in range(width):
            running += energy_BT[i, t]
            summed_BT[i, t] = running
    advantages_BT = np.zeros(mask_BT.shape)
    for members in groups_of(groups_B, valid_B):
        longest, tail = lone_tail({i: length(mask_BT[i]) for i in members})
        for t in range(width):
            present = [i for i in members if mask_BT[i, t]]
            top = math.fsum(returns_BT[i, t] * summed_BT[i, t] for i in present)
            baseline = top / (math.fsum(summed_BT[i, t] for i in present) + eps)
            for i in present:
                unused = len(members) == 1 or (zero_tail and i == longest and t >= tail)
                advantages_BT[i, t] = returns_BT[i, t] - (0.0 if unused else baseline)
    return advantages_BT, returns_BT


def tir_optimal_token_baseline(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    old_log_probs_BT: Floats,
    sum_pi_squared_BT: Floats,
    rollout_weights_BT: Floats | None = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> Pair:
    """Position s is the s-th generated token; a response that has ended takes no part any more."""
    mask_BT = only_valid(response_mask_BT, valid_B)
    returns_BT = rewards_to_go(token_level_rewards_BT, mask_BT)
    energy_BT = score_energy(mask_BT, old_log_probs_BT, sum_pi_squared_BT, rollout_weights_BT)
    advantages_BT = np.zeros(mask_BT.shape)
    for members in groups_of(groups_B, valid_B):
        places = {i: [t for t in range(mask_BT.shape[1]) if mask_BT[i, t]] for i in members}
        longest, tail = lone_tail({i: len(places[i]) for i in members})
        alone = sum(bool(place) for place in places.values()) == 1
        for s in range(max(len(place) for place in places.values())):
            present = [i for i in members if s < len(places[i])]
            summed = {i: math.fsum(energy_BT[i, t] for t in places[i][: s + 1]) for i in present}
            top = math.fsum(returns_BT[i, places[i][s]] * summed[i] for i in present)
            baseline = top / (math.fsum(summed.values()) + eps)
            for i in present:
                unused = alone or (zero_tail and i == longest and s >= tail)
                t = places[i][s]
                advantages_BT[i, t] = returns_BT[i, t] - (0.0 if unused else baseline)
    return advantages_BT, returns_BT


def resampling_weights(*, rewards_B: Floats, kind: str = "power", power: float = 2.0) -> Floats:
    largest, smallest = max(rewards_B), min(rewards_B)
    rules: dict[str, Callable[[float], float]] = {
        "power": lambda reward: abs(reward) ** power,
        "extremes": lambda reward: 1.0 if reward in (largest, smallest) else 0.0,
        "best": lambda reward: 0.4 if reward == largest else 0.1,
    }
    return np.array([rules[kind](float(reward)) for reward in rewards_B])


def resampling_probabilities(*, weights_B: Floats) -> Floats:
    """Probability of each sample in one draw."""
    raised = [float(weight) + 1e-8 for weight in weights_B]
    return np.array([weight / math.fsum(raised) for weight in raised])


def resample(*, weights_B: Floats, generator: np.random.Generator) -> Ints:
    """Draw as many samples as the batch has, with replacement."""
    chosen_B = generator.choice(len(weights_B), size=len(weights_B), p=resampling_probabilities(weights_B=weights_B))
    return chosen_B.astype(np.int64)


def totals(token_level_rewards_BT: Floats, valid_B: Bools) -> Floats:
    """R_i over all positions; NaN for invalid samples, because NaN makes any use visible."""
    return np.array(
        [math.fsum(row) if ok else math.nan for row, ok in zip(token_level_rewards_BT, valid_B, strict=True)]
    )


def groups_of(groups_B: Ints, valid_B: Bools) -> list[list[int]]:
    """Valid members of each group with valid members."""
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups_B):
        if valid_B[i]:
            members.setdefault(int(group), []).append(i)
    return list(members.values())


def group_normalised(rewards_B: Floats, groups_B: Ints, valid_B: Bools, scale: str, eps: float) -> Floats:
    """Rewards minus the group's mean, divided by the standard deviation of the group, of all samples, or by nothing."""
    everyone = [float(rewards_B[i]) for i in range(len(rewards_B)) if valid_B[i]]
    advantages_B = np.zeros(len(rewards_B))
    for members in groups_of(groups_B, valid_B):
        rewards = [float(rewards_B[i]) for i in members]
        centre = mean(rewards) if len(rewards) > 1 else 0.0
        if scale == "none":
            divisor = 1.0
        else:
            spread = {"group": rewards, "batch": everyone}[scale]
            divisor = (math.sqrt(unbiased_variance(spread)) if len(spread) > 1 else 1.0) + eps
        for i in members:
            advantages_B[i] = (rewards_B[i] - centre) / divisor
    return advantages_B


def same_on_every_token(advantages_B: Floats, mask_BT: Bools) -> Pair:
    advantages_BT = np.zeros(mask_BT.shape)
    for i, t in positions(mask_BT):
        advantages_BT[i, t] = advantages_B[i]
    return advantages_BT, advantages_BT.copy()


def whitened_on_tokens(advantages_B: Floats, mask_BT: Bools) -> Pair:
    """One number per sample, whitened over tokens; the returns are the same."""
    whitened_BT = whiten(values_BT=same_on_every_token(advantages_B, mask_BT)[0], mask_BT=mask_BT)
    return whitened_BT, whitened_BT.copy()


def rewards_to_go(token_level_rewards_BT: Floats, mask_BT: Bools) -> Floats:
    width = mask_BT.shape[1]
    returns_BT = np.zeros(mask_BT.shape)
    for i, t in positions(mask_BT):
        returns_BT[i, t] = math.fsum(token_level_rewards_BT[i, s] for s in range(t, width) if mask_BT[i, s])
    return returns_BT


def score_energy(mask_BT: Bools, old_BT: Floats, sum_pi_squared_BT: Floats, weights_BT: Floats | None) -> Floats:
    """The squared norm of the score by the logits."""
    energy_BT = np.zeros(mask_BT.shape)
    for i, t in positions(mask_BT):
        energy = 1.0 - 2.0 * math.exp(old_BT[i, t]) + float(sum_pi_squared_BT[i, t])
        energy_BT[i, t] = energy if weights_BT is None else energy * float(weights_BT[i, t]) ** 2
    return energy_BT


def lone_tail(lengths: dict[int, int]) -> tuple[int | None, int]:
    """Strictly longest member of a group, or None, and the length of the second."""
    ordered = sorted(lengths, key=lambda i: lengths[i], reverse=True)
    if len(ordered) < 2 or lengths[ordered[0]] == lengths[ordered[1]]:
        return None, 0
    return ordered[0], lengths[ordered[1]]
