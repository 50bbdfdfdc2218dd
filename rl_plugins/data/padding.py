"""Padding of ragged lists to rectangular tensors, and change of width, without a Python loop over tokens.

Axes: `B` rows, `W` width (the longest row).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Side = Literal["left", "right"]


def pad_ragged(
    rows: Sequence[Sequence[float]], *, value: float, dtype: torch.dtype, side: Side
) -> tuple[Tensor, Tensor]:
    """Return the rows as one tensor [B, W], padded with `value` on one side, and the length of each row, int64 [B]."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    width = int(lengths.max(initial=0))
    column = np.arange(width)
    kept = column < lengths[:, None] if side == "right" else column >= width - lengths[:, None]
    flat = np.fromiter(
        itertools.chain.from_iterable(rows),
        dtype=np.float64 if dtype.is_floating_point else np.int64,
        count=int(lengths.sum()),
    )
    padded = np.full((len(rows), width), value, dtype=flat.dtype)
    padded[kept] = flat
    return torch.from_numpy(padded).to(dtype), torch.from_numpy(lengths)


def fit_width(tensor: Tensor, width: int, side: Side) -> Tensor:
    """Return `tensor` [B, W, ...] with `width` columns; zeros are added, or columns dropped, on the padded side."""
    change = width - tensor.shape[1]
    if change == 0:
        return tensor
    other_axes = (0, 0) * (tensor.ndim - 2)
    return torch.nn.functional.pad(tensor, (*other_axes, change, 0) if side == "left" else (*other_axes, 0, change))
