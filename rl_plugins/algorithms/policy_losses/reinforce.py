"""Policy gradients on the log-probability itself: REINFORCE, and CISPO, which weighs it by a clipped ratio."""

from __future__ import annotations

from torch import Tensor

from rl_plugins.algorithms.policy_losses.inputs import bounded_log_ratio, check_not_negative, zero_masked


def reinforce(
    *, log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient without a ratio: `-A log_probs`.

    This is GPG's loss too (https://arxiv.org/abs/2504.02546): what is new there is the advantage.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy before the update; for the metric only.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.

    Returns:
        Loss [B, T] and metric `ppo_kl` [B, T].

    Source: Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    ppo_kl_BT = -bounded_log_ratio(log_probs_BT.detach(), old_log_probs_BT)
    return -advantages_BT * log_probs_BT, {"ppo_kl": ppo_kl_BT}


def cispo(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clips the importance weight instead of the update, so that every token keeps a gradient.

    `-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log_probs`, with `ratio = exp(log_probs - old_log_probs)` and
    `sg` the stop-gradient.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy that the ratio is taken against.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        clip_low: width of the range below 1; 1 or more is no lower bound (as MiniMax-M1 trains).
        clip_high: width of the range above 1.

    Returns:
        Loss [B, T] and metrics `clip_fraction` (the weight was clipped), `ppo_kl` [B, T].

    Raises:
        ValueError: a negative width.

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
