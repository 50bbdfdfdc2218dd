"""Changes of the reward by its size or by the length of the response."""

from __future__ import annotations

import numpy as np

from rl_plugins.tests.algorithms.reference.masked import Floats, Ints, clamp


def overlong_penalty(*, response_lengths_B: Ints, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> Floats:
    """0 up to max_tokens - buffer_tokens, then a line down to -factor at max_tokens, and -factor beyond."""
    penalty_B = np.zeros(len(response_lengths_B))
    for i, tokens in enumerate(response_lengths_B):
        excess = int(tokens) - (max_tokens - buffer_tokens)
        if excess > 0:
            penalty_B[i] = max(-factor * excess / buffer_tokens, -factor)
    return penalty_B


def clip_rewards(*, rewards_B: Floats, low: float = -10.0, high: float = 10.0) -> Floats:
    return np.array([clamp(float(reward), low, high) for reward in rewards_B])
