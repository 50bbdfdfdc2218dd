"""The critic's loss: one term per token, [B, T], to be aggregated by `aggregation.aggregate`."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    *,
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    response_mask_BT: Tensor,
    clip: float | None = 0.5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the values, with PPO's clip around the old values.

    `max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2`: a value has no gradient if it has moved by more
    than `clip` towards its return.

    Args:
        values_BT: values of the critic that is being updated, with gradient.
        old_values_BT: values of the critic before the update; not used without a clip.
        clip: largest change of a value in one update, above 0; None for the plain squared error.

    Returns:
        Loss [B, T] and, with a clip, the metric `value_clip_fraction` [B, T].

    Raises:
        ValueError: `clip` is not above 0.

    Source: https://arxiv.org/abs/2005.12729, section 3.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip}: must be above 0, or None for no clipping")
    valid_BT = response_mask_BT.bool()
    values_BT = torch.where(valid_BT, values_BT, 0)
    returns_BT = torch.where(valid_BT, returns_BT, 0)
    loss_BT = (values_BT - returns_BT).square() / 2
    if clip is None:
        return loss_BT, {}
    old_values_BT = torch.where(valid_BT, old_values_BT, 0).detach()
    near_BT = values_BT.clamp(old_values_BT - clip, old_values_BT + clip)
    clipped_BT = (near_BT - returns_BT).square() / 2
    is_clipped_BT = clipped_BT > loss_BT
    return torch.where(is_clipped_BT, clipped_BT, loss_BT), {"value_clip_fraction": is_clipped_BT.float()}
