"""Advantages from rewards of tokens: GAE, REINFORCE++, ReMax, PRIME, reverse KL and the optimal token baseline.

A return is the sum of the rewards after a token. Rewards count only on sampled tokens. A masked position is skipped
with its reward, and an observation between two tokens is no step of the discount. So the score of a response belongs on
its last sampled token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.group_relative import grpo
from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.masked import (
    group_leaders,
    group_numbers,
    group_statistics,
    last_valid,
    learned_tokens,
    on_every_token,
    sequence_means,
    whiten,
)
from rl_plugins.config.settings import FROM_0_TO_1, NOT_NEGATIVE, check_ranges


def discounted_returns(rewards_BT: Tensor, learned_BT: Tensor, gamma: float = 1.0) -> Tensor:
    """Compute `g_t = r_t + gamma g_next`, `next` being the next sampled token; 0 at masked positions, [B, T]."""
    rewards_BT = torch.where(learned_BT, rewards_BT, 0)
    if gamma == 1:
        return torch.where(learned_BT, rewards_BT.flip(-1).cumsum(dim=-1).flip(-1), 0)
    returns_BT = torch.zeros_like(rewards_BT)
    return_B = rewards_BT.new_zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        return_B = torch.where(learned_BT[:, t], rewards_BT[:, t] + gamma * return_B, return_B)
        returns_BT[:, t] = return_B
    return torch.where(learned_BT, returns_BT, 0)


def gae(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    values_BT: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    normalize: bool = True,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over sampled tokens, whitened over all tokens of the batch.

    Backwards over the sampled tokens of a response, `next` being the next sampled token (0 after the last):
    `G_t = r_t + gamma V_next - V_t + gamma lam G_next`. Then `A = whiten(G)` and `returns = G + V`. Observations
    between the tokens are skipped: their rewards and values do not count, and no step of the discount is taken. Masked
    positions hold 0; some implementations leave whitened values there.

    Args:
        groups_B: not used.
        values_BT: the critic's estimate of the return before each token; no gradient flows into the values.
        gamma: discount per sampled token, 0 to 1.
        lam: 1 uses the rewards only, 0 the values only.
        normalize: False leaves out the whitening: `A = G`.

    Returns:
        Advantages, and the returns before whitening (the targets of the critic), [B, T].

    Raises:
        ValueError: `gamma` or `lam` is outside [0, 1].

    Source: https://arxiv.org/abs/1506.02438, equation 16.
    """
    check_ranges(float, FROM_0_TO_1, gamma=gamma, lam=lam)
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    rewards_BT = torch.where(learned_BT, token_level_rewards_BT, 0)
    values_BT = torch.where(learned_BT, values_BT.detach(), 0)
    gains_BT = torch.zeros_like(rewards_BT)
    next_value_B = gain_B = rewards_BT.new_zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        learned_B, value_B = learned_BT[:, t], values_BT[:, t]
        td_error_B = rewards_BT[:, t] + gamma * next_value_B - value_B
        gain_B = torch.where(learned_B, td_error_B + gamma * lam * gain_B, gain_B)
        next_value_B = torch.where(learned_B, value_B, next_value_B)
        gains_BT[:, t] = gain_B
    returns_BT = torch.where(learned_BT, gains_BT + values_BT, 0)
    if not normalize:
        return torch.where(learned_BT, gains_BT, 0), returns_BT
    return whiten(gains_BT, learned_BT, sum_over_ranks), returns_BT


def reinforce_plus_plus(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    gamma: float = 1.0,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++: discounted returns, whitened over all tokens of the batch.

    `A = whiten(g)`, `g_t = r_t + gamma g_next`. The paper places the KL penalty in the reward.

    Args:
        groups_B: not used, because the baseline is the mean of the batch.
        gamma: discount per sampled token, 0 to 1.

    Returns:
        Advantages, and the discounted returns before whitening, [B, T].

    Raises:
        ValueError: `gamma` is outside [0, 1].

    Source: REINFORCE++, https://arxiv.org/abs/2501.03262.
    """
    check_ranges(float, FROM_0_TO_1, gamma=gamma)
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    returns_BT = discounted_returns(token_level_rewards_BT, learned_BT, gamma)
    return whiten(returns_BT, learned_BT, sum_over_ranks), returns_BT


def reinforce_plus_plus_baseline(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a baseline: `whiten(R - mean of the group)` over all tokens of the batch.

    R is the sum of the token-level rewards over all positions, masked positions included. The group gives the baseline
    only; the scale is the standard deviation of the batch. The only valid sample of a group keeps its reward before
    whitening.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Source: REINFORCE++, https://arxiv.org/abs/2501.03262.
    """
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    centred_B = rewards_B - group_statistics(rewards_B, groups_B, valid_B).mean_B
    centred_BT = on_every_token(centred_B, response_mask_BT, valid_B)
    advantages_BT = whiten(centred_BT, learned_tokens(response_mask_BT, valid_B), sum_over_ranks)
    return advantages_BT, advantages_BT


def remax(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    baseline_rewards_B: Tensor,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """ReMax: the reward to go, minus the reward of a greedy response to the same prompt.

    `A_t = sum over s >= t of r_s - b`.

    Args:
        groups_B: not used.
        sum_over_ranks: not used, because no statistic of the batch is needed.

    Returns:
        Advantages, and the rewards to go, [B, T]; both 0 at masked positions.

    Source: ReMax, https://arxiv.org/abs/2310.10505.
    """
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    returns_BT = discounted_returns(token_level_rewards_BT, learned_BT)
    return torch.where(learned_BT, returns_BT - baseline_rewards_B.unsqueeze(-1), 0), returns_BT


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
    check_ranges(float, NOT_NEGATIVE, outcome_coefficient=outcome_coefficient, process_coefficient=process_coefficient)
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
    check_ranges(float, NOT_NEGATIVE, coefficient=coefficient, reward_weight=reward_weight)
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


# Optimal token baseline: for each position, the returns of the group weighted by accumulated gradient norms ---------
#
# The variance of the policy gradient is smallest with the baseline `B_t = E[g_t W_t] / E[W_t]`, where `W_t` is the
# squared norm of the gradient of the log-probability of all tokens up to t. The norm is approximated by the gradient
# with respect to the logits, which depends on the probabilities alone.


def optimal_token_baseline(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    old_log_probs_BT: Tensor,
    sum_pi_squared_BT: Tensor,
    rollout_weights_BT: Tensor | None = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Reward to go minus the optimal baseline of the group at the same position: `A_t = g_t - B_t`.

    `B_t = sum_i m g W / (sum_i m W + eps)` over the group, `W_t = sum over s <= t of m_s w_s`,
    `w = 1 - 2 pi + sum over the vocabulary of pi^2`, times the squared importance weight if given. `w` is a sum of
    squares; a value below 0, caused by rounding, is set to 0. The only valid sample of a group has B = 0. If responses
    hold observations, the positions of different samples do not correspond: use `tir_optimal_token_baseline`.

    Args:
        zero_tail: if one response has more tokens than any other response of the group, use no baseline beyond the
            number of tokens of the second longest response. There, the longest response would be its own baseline and
            learn nothing.
        eps: constant added to the denominator.
        sum_over_ranks: not used, because a group is on one rank.

    Returns:
        Advantages, and the rewards to go, [B, T].

    Source: https://arxiv.org/abs/2602.07078.
    """
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    returns_BT = discounted_returns(token_level_rewards_BT, learned_BT)
    energy_BT = _energy(old_log_probs_BT, sum_pi_squared_BT, rollout_weights_BT, learned_BT).cumsum(dim=-1)
    energy_BT = torch.where(learned_BT, energy_BT, 0)
    baseline_BT = _group_baseline(returns_BT, energy_BT, learned_BT, groups_B, valid_B, zero_tail, eps)
    return torch.where(learned_BT, returns_BT - baseline_BT, 0), returns_BT


def tir_optimal_token_baseline(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    old_log_probs_BT: Tensor,
    sum_pi_squared_BT: Tensor,
    rollout_weights_BT: Tensor | None = None,
    zero_tail: bool = True,
    eps: float = 1e-8,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline for tool-integrated reasoning: positions count sampled tokens only.

    The n-th sampled token of a response is compared with the n-th sampled token of every other response of the group,
    however many observations come before. A finished response leaves the numerator and the denominator of `B_t`, so
    responses without observations get the same result as with `optimal_token_baseline`. A response without a sampled
    token is no member of its group: a response whose siblings are all empty keeps its rewards to go.

    Args:
        zero_tail: no baseline beyond the number of tokens of the second longest response.
        eps: constant added to the denominator.
        sum_over_ranks: not used, because a group is on one rank.

    Returns:
        Advantages, and the rewards to go, [B, T].

    Source: https://arxiv.org/abs/2602.07078.
    """
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    returns_BT = discounted_returns(token_level_rewards_BT, learned_BT)
    energy_BT = _energy(old_log_probs_BT, sum_pi_squared_BT, rollout_weights_BT, learned_BT)
    sampled_first_BT = (~learned_BT).long().argsort(dim=-1, stable=True)

    def compacted(x_BT: Tensor) -> Tensor:
        return x_BT.gather(-1, sampled_first_BT)

    compact_learned_BT = compacted(learned_BT)
    compact_energy_BT = torch.where(compact_learned_BT, compacted(energy_BT).cumsum(dim=-1), 0)
    compact_baseline_BT = _group_baseline(
        compacted(returns_BT),
        compact_energy_BT,
        compact_learned_BT,
        groups_B,
        learned_BT.any(dim=-1),
        zero_tail,
        eps,
    )
    baseline_BT = torch.zeros_like(returns_BT).scatter(-1, sampled_first_BT, compact_baseline_BT)
    return torch.where(learned_BT, returns_BT - baseline_BT, 0), returns_BT


def _energy(
    old_log_probs_BT: Tensor, sum_pi_squared_BT: Tensor, rollout_weights_BT: Tensor | None, learned_BT: Tensor
) -> Tensor:
    """Compute the squared gradient norm of each sampled token, [B, T]; 0 at masked positions."""
    norm_BT = (1 - 2 * old_log_probs_BT.exp() + sum_pi_squared_BT).clamp(min=0)
    if rollout_weights_BT is not None:
        norm_BT = norm_BT * rollout_weights_BT.square()
    return torch.where(learned_BT, norm_BT, 0)


def _group_baseline(
    returns_BT: Tensor,
    energy_BT: Tensor,
    learned_BT: Tensor,
    groups_B: Tensor,
    members_B: Tensor,
    zero_tail: bool,
    eps: float,
) -> Tensor:
    """Compute `B_t` of each sample from the sums `W_t`, [B, T]; the returns must be 0 at masked positions.

    Args:
        members_B: True for the members of each group; a lone member has no baseline.
    """
    group_of_B, num_groups = group_numbers(groups_B)

    def group_sum(x_BT: Tensor) -> Tensor:
        return x_BT.new_zeros(num_groups, x_BT.shape[1]).index_add_(0, group_of_B, x_BT)

    baseline_GT = group_sum(returns_BT * energy_BT) / (group_sum(energy_BT) + eps)
    alone_G1 = group_sum(members_B.long().unsqueeze(-1)) <= 1
    baseline_BT = baseline_GT.masked_fill(alone_G1, 0)[group_of_B]
    if zero_tail:
        longest_B, second_length_B = group_leaders(learned_BT.sum(dim=-1).double(), groups_B, members_B)
        positions_T = torch.arange(learned_BT.shape[1], device=learned_BT.device)
        tail_BT = longest_B.unsqueeze(-1) & (positions_T >= second_length_B.unsqueeze(-1))
        baseline_BT = baseline_BT.masked_fill(tail_BT, 0)
    return baseline_BT
