"""Safe RLHF a second time, sample by sample, from the paper: lambda, and the advantages of reward and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def multipliers(
    costs_of_steps: Sequence[Sequence[float]],
    *,
    threshold: float,
    initial: float,
    rate: float,
    maximum: float,
    window: int,
) -> list[float]:
    """Return lambda after each step: the derivative of `exp(x) (mean cost - threshold)` by x is added to x."""
    log_lambda, values = math.log(initial), []
    for step in range(len(costs_of_steps)):
        episodes = [cost for past in costs_of_steps[max(0, step + 1 - window) : step + 1] for cost in past]
        if episodes:
            mean_cost = math.fsum(episodes) / len(episodes)
            log_lambda += rate * math.exp(log_lambda) * (mean_cost - threshold)
            log_lambda = min(log_lambda, math.log(maximum))
        values.append(math.exp(log_lambda))
    return values


def advantages_and_returns(
    *,
    scores_B: Floats,
    costs_B: Floats,
    kl_BT: Floats,
    values_BT: Floats,
    cost_values_BT: Floats,
    mask_BT: NDArray[Any],
    valid_B: NDArray[Any],
    beta: float,
    gamma: float,
    lam: float,
    multiplier: float,
) -> tuple[Floats, Floats, Floats]:
    """Return the advantages of the policy, the returns of the rewards, and the returns of the costs, [B, T].

    Reward and cost of a response are on the last sampled token. Every token pays `beta kl`, as a smaller reward and as
    a larger cost.
    """
    combined, returns, cost_returns = (np.zeros(mask_BT.shape) for _ in range(3))
    for i in range(len(scores_B)):
        if not valid_B[i]:
            continue
        tokens = [t for t in range(mask_BT.shape[1]) if mask_BT[i, t]]
        next_value = next_cost_value = gain = cost_gain = 0.0
        for t in reversed(tokens):
            penalty = beta * float(kl_BT[i, t])
            last = t == tokens[-1]
            reward = (float(scores_B[i]) if last else 0.0) - penalty
            cost = (float(costs_B[i]) if last else 0.0) + penalty
            value, cost_value = float(values_BT[i, t]), float(cost_values_BT[i, t])
            gain = reward + gamma * next_value - value + gamma * lam * gain
            cost_gain = cost + gamma * next_cost_value - cost_value + gamma * lam * cost_gain
            next_value, next_cost_value = value, cost_value
            combined[i, t] = (gain - multiplier * cost_gain) / (1 + multiplier)
            returns[i, t], cost_returns[i, t] = gain + value, cost_gain + cost_value
    return combined, returns, cost_returns
