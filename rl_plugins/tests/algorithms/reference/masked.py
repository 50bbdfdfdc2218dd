"""Statistics over the positions in the mask, and the array types of this package."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Mask = NDArray[np.float64] | NDArray[np.bool_] | NDArray[np.int64]


def positions(mask_BT: Mask) -> Iterator[tuple[int, int]]:
    """(sample, position) pairs in the mask, row by row."""
    samples, width = mask_BT.shape
    for i in range(samples):
        for t in range(width):
            if mask_BT[i, t]:
                yield i, t


def only_valid(mask_BT: Mask, valid_B: Bools) -> Bools:
    """The mask without the samples whose reward failed."""
    chosen_BT: Bools = mask_BT.astype(bool) & valid_B.astype(bool)[:, None]
    return chosen_BT


def length(mask_T: Mask) -> int:
    """L_i."""
    return sum(1 for entry in mask_T if entry)


def row_values(values_T: Floats, mask_T: Mask) -> list[float]:
    """Values of one row at the positions in the mask."""
    return [float(value) for value, entry in zip(values_T, mask_T, strict=True) if entry]


def mean(values: list[float]) -> float:
    """The mean; 0 of nothing."""
    return math.fsum(values) / len(values) if values else 0.0


def unbiased_variance(values: list[float]) -> float:
    """Variance with the divisor n - 1, for at least two values."""
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def masked_mean(values_BT: Floats, mask_BT: Mask) -> float:
    """Mean over all positions in the mask; 0 for an empty mask."""
    return mean([float(values_BT[i, t]) for i, t in positions(mask_BT)])


def whiten(*, values_BT: Floats, mask_BT: Mask, eps: float = 1e-8) -> Floats:
    """(x - mean) / sqrt(variance + eps) over the positions in the mask, 0 elsewhere; one position is centred only."""
    chosen = [float(values_BT[i, t]) for i, t in positions(mask_BT)]
    centre = mean(chosen)
    scale = math.sqrt(unbiased_variance(chosen) + eps) if len(chosen) > 1 else 1.0
    whitened_BT = np.zeros(mask_BT.shape)
    for i, t in positions(mask_BT):
        whitened_BT[i, t] = (values_BT[i, t] - centre) / scale
    return whitened_BT


def clamp(value: float, low: float, high: float) -> float:
    """`value` inside [low, high]."""
    return min(max(value, low), high)
