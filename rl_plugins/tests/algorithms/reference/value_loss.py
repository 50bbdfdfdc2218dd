"""The critic's loss per token."""

from __future__ import annotations

import numpy as np

from rl_plugins.tests.algorithms.reference.masked import Floats, Mask, clamp, positions


def value_loss(
    *,
    values_BT: Floats,
    old_values_BT: Floats,
    returns_BT: Floats,
    response_mask_BT: Mask,
    clip: float | None = 0.5,
) -> Floats:
    loss_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        value, old, target = float(values_BT[i, t]), float(old_values_BT[i, t]), float(returns_BT[i, t])
        error = (value - target) ** 2
        if clip is not None:
            error = max(error, (clamp(value, old - clip, old + clip) - target) ** 2)
        loss_BT[i, t] = error / 2
    return loss_BT
