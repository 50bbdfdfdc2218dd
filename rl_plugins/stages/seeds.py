"""Seeds that depend only on the sampled prompt and sample, not on the rank, the step or the order of sampling."""

from __future__ import annotations

import numpy as np


def seed_of(*place: int) -> int:
    """Return the seed of a sample, which `place` identifies."""
    return int(np.random.SeedSequence(place).generate_state(1)[0]) >> 1
