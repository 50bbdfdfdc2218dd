"""The advantage of a token in the eyes of a teacher."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.group_relative import grpo
from rl_plugins.algorithms.advantages.interface import learned_tokens, one_rank


def reverse_kl(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    old_log_probs_BT: Tensor,
    teacher_log_probs_BT: Tensor,
    coefficient: float = 1.0,
    bound: float | None = 10.0,
    reward_weight: float = 0.0,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """On-policy distillation: each token is worth how much more likely the teacher finds it than the policy.

    `A_t = -coefficient clip(log pi_old - log pi_teacher, -bound, bound) + reward_weight A_grpo`: the gradient of the
    reverse KL to the teacher, one token at a time, without a look at later tokens.

    Args:
        token_level_rewards_BT: rewards per token; only with `reward_weight`.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        old_log_probs_BT: log-probability of each token under the policy before the update.
        teacher_log_probs_BT: the same under the teacher.
        coefficient: weight of the teacher.
        bound: largest |log-ratio|; None for no bound.
        reward_weight: weight of the group-relative advantage of the task's reward (`grpo`).
        sum_over_ranks: element-wise sum of a tensor over ranks.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Raises:
        ValueError: a negative coefficient or weight, or a bound that is not above 0.

    Source: https://arxiv.org/abs/2306.13649.
    """
    for name, value in {"coefficient": coefficient, "reward_weight": reward_weight}.items():
        if not value >= 0:
            raise ValueError(f"{name}={value}: must be 0 or more")
    if bound is not None and not bound > 0:
        raise ValueError(f"bound={bound}: must be above 0, or None for no bound")
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    log_ratio_BT = torch.where(learned_BT, old_log_probs_BT - teacher_log_probs_BT, 0)
    if bound is not None:
        log_ratio_BT = log_ratio_BT.clamp(-bound, bound)
    advantages_BT = -coefficient * log_ratio_BT
    if reward_weight:
        of_task_BT, _ = grpo(
            token_level_rewards_BT=token_level_rewards_BT,
            response_mask_BT=response_mask_BT,
            groups_B=groups_B,
            valid_B=valid_B,
            sum_over_ranks=sum_over_ranks,
        )
        advantages_BT = advantages_BT + reward_weight * of_task_BT
    return advantages_BT, advantages_BT
