"""Policy gradients of single tokens: REINFORCE, CISPO (clipped importance weight) and PPO (clipped surrogate)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.checks import check_not_negative
from rl_plugins.algorithms.masked import zero_masked

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exponentiation: e^20 is finite in float32 and far outside any clip range."""


def bounded_log_ratio(log_probs_BT: Tensor, old_log_probs_BT: Tensor) -> Tensor:
    """Compute `log_probs - old_log_probs`, within +-`MAX_LOG_RATIO`; no gradient beyond."""
    return (log_probs_BT - old_log_probs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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
        clip_low: width of the clip range below 1.
        clip_high: width of the clip range above 1 (DAPO's clip-higher: larger than `clip_low`).
        dual_clip: bound on the loss of tokens with negative advantage, above 1; None for no bound.

    Returns:
        Loss [B, T] and metrics `clip_fraction`, `dual_clip_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: `dual_clip` is not above 1.

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


def cispo(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with a clipped importance weight in place of a clipped update: every token keeps a gradient.

    `-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log_probs`, with `ratio = exp(log_probs - old_log_probs)` and
    `sg` the stop-gradient.

    Args:
        clip_low: width of the range below 1; 1 or more is no lower bound (as MiniMax-M1 trains).
        clip_high: width of the range above 1.

    Returns:
        Loss [B, T] and metrics `clip_fraction` (the weight was clipped), `ppo_kl` [B, T].

    Raises:
        ValueError: a width is negative.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5.
    """
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    log_ratio_BT = bounded_log_ratio(log_probs_BT.detach(), old_log_probs_BT)
    ratio_BT = log_ratio_BT.exp()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"clip_fraction": (weight_BT != ratio_BT).float(), "ppo_kl": -log_ratio_BT}
    return -weight_BT * advantages_BT * log_probs_BT, metrics


def reinforce(
    *, log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient without a ratio: `-A log_probs`.

    GPG has the same loss (https://arxiv.org/abs/2504.02546); its advantage is new.

    Args:
        old_log_probs_BT: log-probability of each token under the policy before the update, for the metric only.

    Returns:
        Loss [B, T] and metric `ppo_kl` [B, T].

    Source: Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    ppo_kl_BT = -bounded_log_ratio(log_probs_BT.detach(), old_log_probs_BT)
    return -advantages_BT * log_probs_BT, {"ppo_kl": ppo_kl_BT}
