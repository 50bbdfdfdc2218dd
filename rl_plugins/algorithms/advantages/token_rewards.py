"""Advantages from a signal on every token: a process reward model (PRIME) or a teacher (reverse KL)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.group_relative import grpo
from rl_plugins.algorithms.advantages.returns import discounted_returns
from rl_plugins.algorithms.checks import check_not_negative
from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.masked import group_statistics, last_valid, learned_tokens, sequence_means, whiten


def prime(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    process_rewards_BT: Tensor,
    outcome_coefficient: float = 5.0,
    process_coefficient: float = 5.0,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """PRIME: rewards to go of outcome and process rewards, each leave-one-out, whitened over all tokens of the batch.

    With `n` samples in the group, `c_i` the mean process reward of sample i over its tokens and `R_i` its outcome (the
    sum of its token-level rewards over all positions): `r_t = process_coefficient (n p_t - sum over the group of c) /
    (n - 1)`, plus `outcome_coefficient (n R - sum over the group of R) / (n - 1)` on the last sampled token;
    `A_t = whiten(sum over s >= t of r_s)`.

    A sample without a sampled token has no process reward and counts in the outcomes only. If a single sample counts,
    no baseline exists and its rewards stay unchanged, as in every estimator here.

    Args:
        outcome_coefficient: weight of the outcome.
        process_coefficient: weight of the process rewards.

    Returns:
        Advantages, and the rewards to go before whitening, [B, T].

    Raises:
        ValueError: a coefficient is negative.

    Source: PRIME, https://arxiv.org/abs/2502.01456; the coefficients, and the baseline as a mean over tokens, from its
    code, https://github.com/volcengine/verl, `recipe/prime/prime_core_algos.py`.
    """
    check_not_negative(outcome_coefficient=outcome_coefficient, process_coefficient=process_coefficient)
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    outcomes_B = token_level_rewards_BT.sum(dim=-1)
    scale_B, baseline_B = _leave_one_out(outcomes_B, groups_B, valid_B)
    rewards_BT = torch.where(last_valid(learned_BT), (scale_B * outcomes_B - baseline_B)[:, None], 0)
    rewards_BT = outcome_coefficient * rewards_BT

    means_B = sequence_means(process_rewards_BT, learned_BT)
    scale_B, baseline_B = _leave_one_out(means_B, groups_B, learned_BT.any(dim=-1))
    process_BT = scale_B[:, None] * process_rewards_BT - baseline_B[:, None]
    rewards_BT = rewards_BT + process_coefficient * torch.where(learned_BT, process_BT, 0).to(rewards_BT)

    returns_BT = discounted_returns(rewards_BT, learned_BT)
    return whiten(returns_BT, learned_BT, sum_over_ranks), returns_BT


def _leave_one_out(values_B: Tensor, groups_B: Tensor, counted_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return `a` and `b` [B]: `a x - b` is the value x of a sample minus the mean over the rest of its group."""
    groups = group_statistics(values_B, groups_B, counted_B)
    scale_B = torch.where(groups.count_B > 1, groups.count_B / (groups.count_B - 1).clamp(min=1), 1)
    # A group with a single counted sample has mean 0, so its baseline is 0.
    return scale_B, scale_B * groups.mean_B


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
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """On-policy distillation: the advantage of a token is the log-ratio of the teacher to the policy.

    `A_t = -coefficient clip(log pi_old - log pi_teacher, -bound, bound) + reward_weight A_grpo`: the gradient of the
    reverse KL to the teacher for each token alone, without the effect on later tokens.

    Args:
        token_level_rewards_BT: reward of each token, used only with `reward_weight`.
        coefficient: weight of the teacher's log-ratio.
        bound: largest absolute log-ratio, in nats; None for no bound.
        reward_weight: weight of the group-relative advantage of the task's reward (`grpo`).

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Raises:
        ValueError: a coefficient or weight is negative, or `bound` is not above 0.

    Source: https://arxiv.org/abs/2306.13649.
    """
    check_not_negative(coefficient=coefficient, reward_weight=reward_weight)
    if bound is not None and not bound > 0:
        raise ValueError(f"bound={bound}: must be above 0, or None for no bound")
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    log_ratio_BT = torch.where(learned_BT, old_log_probs_BT - teacher_log_probs_BT, 0)
    if bound is not None:
        log_ratio_BT = log_ratio_BT.clamp(-bound, bound)
    advantages_BT = -coefficient * log_ratio_BT
    if reward_weight:
        task_advantages_BT, _ = grpo(
            token_level_rewards_BT=token_level_rewards_BT,
            response_mask_BT=response_mask_BT,
            groups_B=groups_B,
            valid_B=valid_B,
            sum_over_ranks=sum_over_ranks,
        )
        advantages_BT = advantages_BT + reward_weight * task_advantages_BT
    return advantages_BT, advantages_BT
