"""Numbers of the distribution a token was drawn from, by their definitions, one token after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def probabilities(logits: Floats, temperature: float) -> Floats:
    """Softmax of one token's logits."""
    weights = np.exp((logits - logits.max()) / temperature)
    result: Floats = weights / weights.sum()
    return result


def columns(hidden: Floats, weight: Floats, bias: Floats, tokens: list[int], temperature: float) -> Floats:
    """Log-prob of the token, entropy, and sum of squared probabilities of every row of `hidden`."""
    rows = []
    for state, token in zip(hidden, tokens, strict=True):
        pi = probabilities(
            np.array([state @ row + offset for row, offset in zip(weight, bias, strict=True)]), temperature
        )
        rows.append([np.log(pi[token]), -sum(p * np.log(p) for p in pi), sum(p * p for p in pi)])
    return np.array(rows).reshape(-1, 3)
