"""Distillation on distributions: the forward KL to a teacher, over the teacher's k most likely tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.masked import zero_masked
from rl_plugins.algorithms.policy_losses.clipped import bounded_log_ratio, ppo_clip
from rl_plugins.config.settings import ABOVE_0, NOT_NEGATIVE, check_ranges


def forward_kl_top_k(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    teacher_top_log_probs_BTK: Tensor,
    top_log_probs_BTK: Tensor,
    teacher_top_weights_BTK: Tensor | None = None,
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
    policy_weight: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Distillation: the forward KL from the teacher to the policy, over the teacher's k most likely tokens.

    `sum over k of p_teacher (log p_teacher - log p)`, within [0, loss_max_clamp]. The probabilities of the k tokens are
    not normalised, so the sum can be negative if the policy gives the k tokens more mass than the teacher does; then
    nothing is left to learn and the gradient is 0. With weighted teachers, the k tokens of each teacher stand side by
    side, and the sum is the weighted sum of the KLs. `policy_weight` adds the clipped surrogate (`ppo_clip`) of the
    task's reward.

    Args:
        log_prob_min_clamp: smallest log-probability of teacher and policy, in nats, below 0; smaller values are raised
            to this bound. None for no bound.
        loss_max_clamp: bound on the KL of a token, in nats; no gradient beyond. None for no bound.
        policy_weight: weight of the surrogate; 0 learns from the teacher alone.
        clip_low: width of the surrogate's clip range below 1.
        clip_high: width of the surrogate's clip range above 1.
        dual_clip: bound on the surrogate for tokens with negative advantage, above 1; None for no bound.

    Returns:
        Loss [B, T] and metrics `forward_kl` (before its bounds), `teacher_mass` and `student_mass` (probability of the
        K tokens, weighted), `ppo_kl`, and with the surrogate also the metrics of the surrogate [B, T].

    Raises:
        ValueError: a weight is negative, or a bound is on the wrong side of 0.

    Source: https://arxiv.org/abs/2306.13649 (forward KL on samples of the student); the form over the top k from
    https://github.com/volcengine/verl, `verl/trainer/distillation`.
    """
    check_ranges(float, NOT_NEGATIVE, policy_weight=policy_weight)
    if loss_max_clamp is not None:
        check_ranges(float, ABOVE_0, loss_max_clamp=loss_max_clamp)
    if log_prob_min_clamp is not None and not log_prob_min_clamp < 0:
        raise ValueError(f"log_prob_min_clamp={log_prob_min_clamp}: must be below 0, or None for no bound")
    teacher_BTK, student_BTK = zero_masked(response_mask_BT.unsqueeze(-1), teacher_top_log_probs_BTK, top_log_probs_BTK)
    top_log_probs = {"teacher_mass": teacher_BTK, "student_mass": student_BTK.detach()}
    weight_BTK = teacher_BTK.new_ones(()) if teacher_top_weights_BTK is None else teacher_top_weights_BTK
    weight_BTK = torch.where(response_mask_BT.bool().unsqueeze(-1), weight_BTK, 0)
    metrics = {name: (weight_BTK * log_probs_BTK.exp()).sum(dim=-1) for name, log_probs_BTK in top_log_probs.items()}
    if log_prob_min_clamp is not None:
        teacher_BTK, student_BTK = teacher_BTK.clamp(min=log_prob_min_clamp), student_BTK.clamp(min=log_prob_min_clamp)
    kl_BT = (weight_BTK * teacher_BTK.exp() * (teacher_BTK - student_BTK)).sum(dim=-1)
    metrics["forward_kl"] = kl_BT.detach()
    loss_BT = kl_BT.clamp(min=0, max=loss_max_clamp)
    if policy_weight == 0:
        current_BT, old_BT = zero_masked(response_mask_BT, log_probs_BT.detach(), old_log_probs_BT)
        return loss_BT, {**metrics, "ppo_kl": -bounded_log_ratio(current_BT, old_BT)}
    surrogate_BT, surrogate_metrics = ppo_clip(
        log_probs_BT=log_probs_BT,
        old_log_probs_BT=old_log_probs_BT,
        advantages_BT=advantages_BT,
        response_mask_BT=response_mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return loss_BT + policy_weight * surrogate_BT, {**metrics, **surrogate_metrics}
