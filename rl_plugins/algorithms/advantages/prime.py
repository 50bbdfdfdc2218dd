"""PRIME: the outcome of a response and the rewards of its tokens, each with a baseline of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.interface import learned_tokens, one_rank
from rl_plugins.algorithms.advantages.returns import discounted_returns
from rl_plugins.algorithms.masked import group_statistics, sequence_means, whiten


def prime(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    process_rewards_BT: Tensor,
    outcome_coefficient: float = 5.0,
    process_coefficient: float = 5.0,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """PRIME: rewards to go of outcome and process rewards, each leave-one-out, whitened over all tokens of the batch.

    With `n` samples in the group, `c_i` the mean process reward of sample i over its tokens and `R_i` its outcome:
    `r_t = process_coefficient (n p_t - sum over the group of c) / (n - 1)`, and on the last sampled token also
    `outcome_coefficient (n R - sum over the group of R) / (n - 1)`; `A_t = whiten(sum over s >= t of r_s)`.

    A sample without a sampled token has no process reward and counts in the outcomes only. Where a sample is the only
    one that counts, there is no baseline: its rewards stay as they are, as in every estimator here.

    Args:
        token_level_rewards_BT: rewards per token; R is their sum over all positions.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        process_rewards_BT: what a process reward model gives for each token (`implicit_process_reward`).
        outcome_coefficient: weight of the outcome.
        process_coefficient: weight of the process rewards.
        sum_over_ranks: element-wise sum of a tensor over ranks.

    Returns:
        Advantages, and the rewards to go before whitening, [B, T].

    Raises:
        ValueError: a negative coefficient.

    Source: PRIME, https://arxiv.org/abs/2502.01456; the coefficients, and the baseline as a mean over tokens, from its
    code, https://github.com/volcengine/verl, `recipe/prime/prime_core_algos.py`.
    """
    for name, value in {"outcome_coefficient": outcome_coefficient, "process_coefficient": process_coefficient}.items():
        if not value >= 0:
            raise ValueError(f"{name}={value}: must be 0 or more")
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    outcomes_B = token_level_rewards_BT.sum(dim=-1)
    scale_B, baseline_B = _leave_one_out(outcomes_B, groups_B, valid_B)
    rewards_BT = torch.where(last_of(learned_BT), (scale_B * outcomes_B - baseline_B)[:, None], 0)
    rewards_BT = outcome_coefficient * rewards_BT

    means_B = sequence_means(process_rewards_BT, learned_BT)
    scale_B, baseline_B = _leave_one_out(means_B, groups_B, learned_BT.any(dim=-1))
    process_BT = scale_B[:, None] * process_rewards_BT - baseline_B[:, None]
    rewards_BT = rewards_BT + process_coefficient * torch.where(learned_BT, process_BT, 0).to(rewards_BT)

    returns_BT = discounted_returns(rewards_BT, learned_BT)
    return whiten(returns_BT, learned_BT, sum_over_ranks), returns_BT


def _leave_one_out(values_B: Tensor, groups_B: Tensor, counted_B: Tensor) -> tuple[Tensor, Tensor]:
    """`a` and `b` [B] for which `a x - b` is x minus the mean of the others, where x is the sample's own value."""
    groups = group_statistics(values_B, groups_B, counted_B)
    scale_B = torch.where(groups.count_B > 1, groups.count_B / (groups.count_B - 1).clamp(min=1), 1)
    # The mean of a lone sample is 0, and so is its baseline.
    return scale_B, scale_B * groups.mean_B


def last_of(mask_BT: Tensor) -> Tensor:
    """True on the last position of each row that the mask keeps, bool [B, T]; nowhere in a row without one."""
    kept_BT = mask_BT.bool()
    return kept_BT & (kept_BT.flip(-1).cumsum(dim=-1).flip(-1) == 1)
