"""Optimal token baseline: for each position, the returns of the group weighted by accumulated gradient norms.

The variance of the policy gradient is smallest with the baseline `B_t = E[g_t W_t] / E[W_t]`, where `W_t` is the
squared norm of the gradient of the log-probability of all tokens up to t. The norm is approximated by the gradient
with respect to the logits, which depends on the probabilities alone.

Source: https://arxiv.org/abs/2602.07078.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.returns import discounted_returns
from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.masked import group_leaders, group_numbers, learned_tokens


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
