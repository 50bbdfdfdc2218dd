"""PPO's clipped surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.policy_losses.inputs import bounded_log_ratio, zero_masked


def ppo_clip(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with separate bounds and, for negative advantages, a lower bound on the objective.

    With `ratio = exp(log_probs - old_log_probs)` and advantage `A`:
    `u = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))`; where `A < 0`: `min(u, -dual_clip A)`.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy that the ratio is taken against.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        clip_low: width of the clip range below 1.
        clip_high: width above 1 (DAPO's clip-higher: larger than `clip_low`).
        dual_clip: bound on the loss of tokens with negative advantage, above 1; None for no bound.

    Returns:
        Loss [B, T] and metrics `clip_fraction`, `dual_clip_fraction`, `ppo_kl` [B, T].

    Source: PPO https://arxiv.org/abs/1707.06347 eq. 7; dual clip https://arxiv.org/abs/1912.09729 eq. 5;
    clip-higher https://arxiv.org/abs/2503.14476 eq. 10.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}: must be above 1, or None for no bound")
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    log_ratio_BT = bounded_log_ratio(log_probs_BT, old_log_probs_BT)
    ratio_BT = log_ratio_BT.exp()
    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = torch.maximum(unclipped_BT, clipped_BT)
    metrics = {"clip_fraction": (clipped_BT > unclipped_BT).float(), "ppo_kl": -log_ratio_BT.detach()}
    if dual_clip is not None:
        bound_BT = -dual_clip * advantages_BT
        negative_BT = advantages_BT < 0
        metrics["dual_clip_fraction"] = (negative_BT & (loss_BT > bound_BT)).float()
        loss_BT = torch.where(negative_BT, torch.minimum(loss_BT, bound_BT), loss_BT)
    return loss_BT, metrics
