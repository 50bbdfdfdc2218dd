"""Losses whose ratio belongs to a whole response: the geometric mean of its tokens' ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.policy_losses.inputs import MAX_LOG_RATIO, check_not_negative, zero_masked

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Upper bound on GSPO's mean log-ratio before exponentiation; no gradient beyond."""


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
    `log s_t = log_probs - sg(log_probs) + sg(log s)`: the value of `s`, and the token's own gradient, so that tokens
    may have different advantages (the paper's GSPO-token; where they are equal it is GSPO). The paper's aggregation is
    `seq-mean-token-mean`. Clip widths are far smaller than PPO's, because a mean varies far less than its terms.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy that the ratio is taken against.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        clip_low: width of the clip range below 1.
        clip_high: width above 1.

    Returns:
        Loss [B, T] and metrics `clip_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: a negative width.

    Source: https://arxiv.org/abs/2507.18071, eq. 5, 7, 13 and 14; widths from its section 5.1.
    """
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
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
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Maximizes the geometric mean of the tokens' clipped ratios, weighed by the sequence's advantage.

    With log-ratio `x` and the mean advantage `a` over the response's valid tokens, `rho = exp(mean of y)`, where
    `y = min(x, clip(x, -clip_low, clip_high))` where `A > 0`, `max` of the two where `A < 0`, and 0 where `A = 0`.
    Every valid token of the response holds `-a rho`, so that `seq-mean-token-mean` is the paper's mean over
    sequences; its gradient reaches each token through `rho`. Implementations that return that mean of a micro-batch
    directly depend on the split into micro-batches; this one does not. A mean above `MAX_LOG_RATIO` is cut to it.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy that the ratio is taken against.
        advantages_BT: advantage of each token, usually the same for all of a response.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        clip_low: how far a log-ratio may fall below 0; a width in log space, not of the ratio.
        clip_high: how far it may rise above 0.

    Returns:
        Loss [B, T] and metrics `clip_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: a negative width.

    Source: https://arxiv.org/abs/2507.20673.
    """
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    log_ratio_BT = log_probs_BT - old_log_probs_BT
    sign_BT = advantages_BT.sign()
    clipped_BT = log_ratio_BT.clamp(-clip_low, clip_high)
    kept_BT = sign_BT * torch.minimum(sign_BT * log_ratio_BT, sign_BT * clipped_BT)
    ratio_B1 = _mean_over_tokens(kept_BT, response_mask_BT).clamp(max=MAX_LOG_RATIO).exp()
    advantage_B1 = _mean_over_tokens(advantages_BT, response_mask_BT)
    loss_BT = torch.where(response_mask_BT.bool(), -advantage_B1 * ratio_B1, 0)
    is_clipped_BT = sign_BT * clipped_BT < sign_BT * log_ratio_BT
    return loss_BT, {"clip_fraction": is_clipped_BT.float(), "ppo_kl": -log_ratio_BT.detach()}


def _mean_over_tokens(values_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Mean of each row over its valid tokens, [B, 1]; masked entries must be 0; an empty row has mean 0."""
    lengths_B1 = response_mask_BT.sum(dim=-1, keepdim=True).clamp(min=1)
    return values_BT.sum(dim=-1, keepdim=True) / lengths_B1
