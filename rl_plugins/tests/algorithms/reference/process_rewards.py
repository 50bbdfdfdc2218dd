"""PRIME: rewards of tokens from a model and its reference, losses of the model, and the advantages."""

from __future__ import annotations

import math

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
    row_values,
    whiten,
)


def prime(
    *,
    token_level_rewards_BT: Floats,
    response_mask_BT: Mask,
    groups_B: Ints,
    valid_B: Bools,
    process_rewards_BT: Floats,
    outcome_coefficient: float = 5.0,
    process_coefficient: float = 5.0,
) -> tuple[Floats, Floats]:
    mask_BT = only_valid(response_mask_BT, valid_B)
    samples, width = mask_BT.shape
    summed_BT = np.zeros(mask_BT.shape)
    for i in range(samples):
        sampled = [t for t in range(width) if mask_BT[i, t]]
        if not sampled:
            continue
        siblings = [j for j in range(samples) if groups_B[j] == groups_B[i] and valid_B[j]]
        # One source after the other: the outcome, on the last token ...
        outcomes = [math.fsum(token_level_rewards_BT[j]) for j in siblings]
        own = math.fsum(token_level_rewards_BT[i])
        summed_BT[i, sampled[-1]] += outcome_coefficient * left_out(own, outcomes)
        # ... and the process rewards, on every token of samples with process rewards.
        means = [mean(row_values(process_rewards_BT[j], mask_BT[j])) for j in siblings if length(mask_BT[j])]
        for t in sampled:
            summed_BT[i, t] += process_coefficient * left_out(float(process_rewards_BT[i, t]), means)
    returns_BT = np.zeros(mask_BT.shape)
    for i, t in positions(mask_BT):
        returns_BT[i, t] = math.fsum(summed_BT[i, t:])
    return whiten(values_BT=returns_BT, mask_BT=mask_BT), returns_BT


def left_out(value: float, means: list[float]) -> float:
    """value n/(n-1) - sum(means)/(n-1)."""
    n = len(means)
    return value if n == 1 else value * n / (n - 1) - math.fsum(means) / (n - 1)


def process_rewards(
    *,
    log_probs_BT: Floats,
    reference_log_probs_BT: Floats,
    response_mask_BT: Mask,
    outcomes_B: Floats | None = None,
    beta: float = 0.05,
    lam: float = 0.0,
    granularity: str = "token",
) -> Floats:
    rewards_BT = np.zeros(response_mask_BT.shape)
    samples, width = response_mask_BT.shape
    for i in range(samples):
        sampled = [t for t in range(width) if response_mask_BT[i, t]]
        if not sampled:
            continue
        scaled = [beta * (log_probs_BT[i, t] - reference_log_probs_BT[i, t]) for t in sampled]
        if outcomes_B is not None:
            scaled[-1] = outcomes_B[i] - math.fsum(scaled[:-1])
        # p_t = sum over k of lam^k q_{t+k}.
        spread = [math.fsum(lam**k * q for k, q in enumerate(scaled[t:])) for t in range(len(scaled))]
        if granularity == "whole":
            rewards_BT[i, sampled[-1]] = math.fsum(spread)
        else:
            rewards_BT[i, sampled[:-1]] = spread[:-1]
    return rewards_BT


def normalized(*, process_rewards_BT: Floats, response_mask_BT: Mask) -> Floats:
    largest = 0.0
    for i, t in positions(response_mask_BT):
        rest = [process_rewards_BT[i, s] for s in range(t, response_mask_BT.shape[1]) if response_mask_BT[i, s]]
        largest = max(largest, abs(math.fsum(rest)))
    normalized_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        normalized_BT[i, t] = process_rewards_BT[i, t] / (largest + 1e-6)
    return normalized_BT


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def process_returns(
    *, log_probs_BT: Floats, reference_log_probs_BT: Floats, response_mask_BT: Mask, beta: float
) -> Floats:
    ratios_BT = log_probs_BT - reference_log_probs_BT
    rows = zip(ratios_BT, response_mask_BT, strict=True)
    return np.array([beta * math.fsum(row_values(ratios_T, mask_T)) for ratios_T, mask_T in rows])


def outcome_cross_entropy(*, returns_B: Floats, outcomes_B: Floats) -> Floats:
    pairs = zip(returns_B, outcomes_B, strict=True)
    return np.array([-y * math.log(sigmoid(z)) - (1 - y) * math.log(1 - sigmoid(z)) for z, y in pairs])


def outcome_preference(
    *, returns_B: Floats, outcomes_B: Floats, groups_B: Ints, valid_B: Bools, best_of_n: str | None
) -> Floats:
    """Loss of the valid samples, with the samples' returns as returns before the update; 0 for invalid samples."""
    losses_B = np.zeros(len(returns_B))
    for i in range(len(returns_B)):
        if not valid_B[i]:
            continue
        siblings = [j for j in range(len(returns_B)) if groups_B[j] == groups_B[i] and valid_B[j]]
        if outcomes_B[i] > 0:
            others = [float(returns_B[j]) for j in siblings if outcomes_B[j] < outcomes_B[i]]
        else:
            others = [float(returns_B[j]) for j in siblings if outcomes_B[j] > outcomes_B[i]]
        gap = returns_B[i] - mean(others)
        losses_B[i] = -math.log(sigmoid(gap if outcomes_B[i] > 0 else -gap))
        if best_of_n is not None:
            values_B = outcomes_B if best_of_n == "outcome" else returns_B
            n = len(siblings)
            losses_B[i] *= n * mean([float(values_B[j] <= values_B[i]) for j in siblings]) ** (n - 1)
    return losses_B
