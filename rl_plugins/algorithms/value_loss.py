"""The critic's loss: per-token terms [B, T], to be aggregated by `aggregation.aggregate` like the policy's."""

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
    """Half the squared error of the values; PPO's pessimistic form near the old ones.

    `max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2`: a value that has moved further than `clip`, and
    came nearer to its return by that, has no gradient.

    Args:
        values_BT: of the critic that is being updated, with gradient.
        old_values_BT: of the critic before the update; not used without a clip.
        returns_BT: what the values should be.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        clip: how far a value may move in one update; None for the plain squared error.

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
