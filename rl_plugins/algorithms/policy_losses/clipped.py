"""Policy gradients with clipped ratios: of each token (PPO, CISPO), or one for a whole response (GSPO, GMPO).

The ratio of a response is the geometric mean of the ratios of its tokens. REINFORCE has no ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.masked import zero_masked
from rl_plugins.config.settings import NOT_NEGATIVE, check_ranges

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exponentiation: e^20 is finite in float32 and far outside any clip range."""
MAX_LOG_SEQUENCE_RATIO = 10.0
"""Upper bound on GSPO's mean log-ratio before exponentiation; no gradient beyond."""


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
    check_ranges(float, NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
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


def gspo(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clip on the sequence ratio `s = exp(mean of the log-ratios of the response's tokens)`.

    Each token's loss is `max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high))` with
    `log s_t = log_probs - sg(log_probs) + sg(log s)`: the value of `s`, and the gradient of the token itself. So tokens
    may have different advantages (the paper's GSPO-token; with equal advantages GSPO). The paper's aggregation is
    `seq-mean-token-mean`. The clip widths are far smaller than PPO's, because a mean varies far less than its terms.

    Args:
        clip_low: width of the clip range below 1.
        clip_high: width of the clip range above 1.

    Returns:
        Loss [B, T] and metrics `clip_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: a width is negative.

    Source: https://arxiv.org/abs/2507.18071, eq. 5, 7, 13 and 14; widths from its section 5.1.
    """
    check_ranges(float, NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    log_ratio_BT = log_probs_BT.detach() - old_log_probs_BT
    sequence_B1 = _mean_over_tokens(log_ratio_BT, response_mask_BT)
    ratio_BT = (log_probs_BT - log_probs_BT.detach() + sequence_B1).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    unclipped_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"clip_fraction": (clipped_BT > unclipped_BT).float(), "ppo_kl": -log_ratio_BT}
    return torch.maximum(unclipped_BT, clipped_BT), metrics


def gmpo(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    rollout_weights_BT: Tensor | None = None,
    loss_mask_BT: Tensor | None = None,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric mean of the clipped ratios of the tokens, weighted by the advantage of the sequence.

    With log-ratio `x` and the mean advantage `a` over the response's valid tokens, `rho = exp(mean of y)`, where
    `y = min(x, clip(x, -clip_low, clip_high))` where `A > 0`, `max` of the two where `A < 0`, and 0 where `A = 0`.
    Every valid token of the response holds `-a rho`, so `seq-mean-token-mean` is the paper's mean over sequences; the
    gradient reaches each token through `rho`. Implementations that return the mean over the sequences of a micro-batch
    depend on the split into micro-batches; this loss does not. A mean of `y` above `MAX_LOG_RATIO` is cut to the bound.

    Importance weights are a part of the geometric mean: `rho = exp(mean of (y + log weight))`. So with untruncated
    weights and without clipping, `rho` is the geometric mean of the ratios to the sampling policy. A token of weight 0
    is left out of both means.

    Args:
        advantages_BT: advantage of each token, usually the same for all tokens of a response.
        rollout_weights_BT: importance weight of each token; None for no weights.
        loss_mask_BT: 0 on tokens without a gradient, which stay in the means; None for a gradient of all tokens.
        clip_low: largest decrease of a log-ratio below 0; a width in log space, not of the ratio.
        clip_high: largest increase of a log-ratio above 0.

    Returns:
        Loss [B, T] and metrics `clip_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: a width is negative.

    Source: https://arxiv.org/abs/2507.20673.
    """
    check_ranges(float, NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    if loss_mask_BT is not None:
        log_probs_BT = torch.where(loss_mask_BT.bool(), log_probs_BT, log_probs_BT.detach())
    log_ratio_BT = log_probs_BT - old_log_probs_BT
    sign_BT = advantages_BT.sign()
    clipped_BT = log_ratio_BT.clamp(-clip_low, clip_high)
    bounded_BT = sign_BT * torch.minimum(sign_BT * log_ratio_BT, sign_BT * clipped_BT)
    counted_BT = response_mask_BT
    if rollout_weights_BT is not None:
        weighted_BT = response_mask_BT.bool() & (rollout_weights_BT > 0)
        bounded_BT = torch.where(weighted_BT, bounded_BT + torch.where(weighted_BT, rollout_weights_BT, 1).log(), 0)
        advantages_BT = torch.where(weighted_BT, advantages_BT, 0)
        counted_BT = weighted_BT
    ratio_B1 = _mean_over_tokens(bounded_BT, counted_BT).clamp(max=MAX_LOG_RATIO).exp()
    advantage_B1 = _mean_over_tokens(advantages_BT, counted_BT)
    loss_BT = torch.where(response_mask_BT.bool(), -advantage_B1 * ratio_B1, 0)
    is_clipped_BT = sign_BT * clipped_BT < sign_BT * log_ratio_BT
    return loss_BT, {"clip_fraction": is_clipped_BT.float(), "ppo_kl": -log_ratio_BT.detach()}


def _mean_over_tokens(values_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Compute the mean of each row over its valid tokens, [B, 1]; masked entries must be 0; 0 for an empty row."""
    lengths_B1 = response_mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)
    return values_BT.sum(dim=-1, keepdim=True) / lengths_B1
