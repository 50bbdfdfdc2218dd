"""The optimal token baseline: for each position, the group's returns weighted by how far gradients have moved.

The variance of the policy gradient is smallest with the baseline `B_t = E[g_t W_t] / E[W_t]`, where `W_t` is the
squared norm of the gradient of the log-probability of all tokens up to t. It is approximated by the gradient with
respect to the logits, which the probabilities alone give.

Source: https://arxiv.org/abs/2602.07078.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.interface import learned_tokens, one_rank
from rl_plugins.algorithms.advantages.returns import discounted_returns
from rl_plugins.algorithms.masked import group_leaders, group_numbers


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
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """Reward to go minus the optimal baseline of the group at the same position: `A_t = g_t - B_t`.

    `B_t = sum_i m g W / (sum_i m W + eps)` over the group, `W_t = sum over s <= t of m_s w_s`,
    `w = 1 - 2 pi + sum over the vocabulary of pi^2`, times the squared importance weight if there is one. `w` is a sum
    of squares; where rounding makes it negative it is 0. A lone sample has B = 0. If responses hold observations,
    positions of different samples do not correspond: use `tir_optimal_token_baseline`.

    Args:
        token_level_rewards_BT: rewards per token; those at masked positions are skipped, so the score of a response
            belongs on its last sampled token.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        old_log_probs_BT: log-probability of each token before the update.
        sum_pi_squared_BT: sum of the squared probabilities of the vocabulary at each position.
        rollout_weights_BT: importance weight of each token, where the engine that sampled differs from the policy.
        zero_tail: where one response of the group has more tokens than any other, no baseline beyond the number of
            tokens of the second longest: alone there, it would be its own baseline, and learn nothing.
        eps: added to the denominator.
        sum_over_ranks: not used: a group is on one rank.

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
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """The optimal token baseline for tool-integrated reasoning: positions count sampled tokens only.

    The n-th sampled token of a response is compared with the n-th sampled tokens of its siblings, however many
    observations came before. A response that has ended stays in the denominator of `B_t` with all its energy, so
    that the baseline of longer ones shrinks; so responses of equal length without observations get what
    `optimal_token_baseline` gives them, others do not.

    Args:
        token_level_rewards_BT: as in `optimal_token_baseline`, like everything else.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        old_log_probs_BT: log-probability of each token before the update.
        sum_pi_squared_BT: sum of the squared probabilities of the vocabulary at each position.
        rollout_weights_BT: importance weight of each token.
        zero_tail: no baseline beyond the number of tokens of the second longest response.
        eps: added to the denominator.
        sum_over_ranks: not used: a group is on one rank.

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

    # A response that has ended stays in the denominator with all that it summed.
    compact_energy_BT = compacted(energy_BT).cumsum(dim=-1)
    compact_baseline_BT = _group_baseline(
        compacted(returns_BT), compact_energy_BT, compacted(learned_BT), groups_B, valid_B, zero_tail, eps
    )
    baseline_BT = torch.zeros_like(returns_BT).scatter(-1, sampled_first_BT, compact_baseline_BT)
    return torch.where(learned_BT, returns_BT - baseline_BT, 0), returns_BT


def _energy(
    old_log_probs_BT: Tensor, sum_pi_squared_BT: Tensor, rollout_weights_BT: Tensor | None, learned_BT: Tensor
) -> Tensor:
    """Squared gradient norm of each sampled token, [B, T]; 0 at masked positions."""
    norm_BT = (1 - 2 * old_log_probs_BT.exp() + sum_pi_squared_BT).clamp(min=0)
    if rollout_weights_BT is not None:
        norm_BT = norm_BT * rollout_weights_BT.square()
    return torch.where(learned_BT, norm_BT, 0)


def _group_baseline(
    returns_BT: Tensor,
    energy_BT: Tensor,
    learned_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    zero_tail: bool,
    eps: float,
) -> Tensor:
    """`B_t` of each sample from the energies `W_t` so far, [B, T]; returns are 0 at masked positions."""
    group_of_B, num_groups = group_numbers(groups_B)

    def group_sum(x_BT: Tensor) -> Tensor:
        return x_BT.new_zeros(num_groups, x_BT.shape[1]).index_add_(0, group_of_B, x_BT)

    baseline_GT = group_sum(returns_BT * energy_BT) / (group_sum(energy_BT) + eps)
    alone_G1 = group_sum(valid_B.long().unsqueeze(-1)) <= 1
    baseline_BT = baseline_GT.masked_fill(alone_G1, 0)[group_of_B]
    if zero_tail:
        longest_B, second_length_B = group_leaders(learned_BT.sum(dim=-1).double(), groups_B, valid_B)
        positions_T = torch.arange(learned_BT.shape[1], device=learned_BT.device)
        tail_BT = longest_B.unsqueeze(-1) & (positions_T >= second_length_B.unsqueeze(-1))
        baseline_BT = baseline_BT.masked_fill(tail_BT, 0)
    return baseline_BT
