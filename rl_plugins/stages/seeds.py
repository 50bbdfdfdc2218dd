"""A seed depends on what is sampled, not on the rank, the step or the order in which it falls."""

from __future__ import annotations

import numpy as np


def seed_of(*place: int) -> int:
    """The seed of what is named by some numbers."""
    return int(np.random.SeedSequence(place).generate_state(1)[0]) >> 1
