"""Advantages from returns, the rewards that a token is followed by, without a value function.

Here a reward counts only on a sampled token: what stands at a masked position is skipped, and so is the step in time
(an observation between two tokens is not discounted for). So the score of a response belongs on its last sampled
token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.interface import check_fractions, learned_tokens, on_every_token, one_rank
from rl_plugins.algorithms.masked import group_statistics, whiten


def discounted_returns(rewards_BT: Tensor, learned_BT: Tensor, gamma: float = 1.0) -> Tensor:
    """`g_t = r_t + gamma g_next` where `next` is the next sampled token; 0 at masked positions, [B, T]."""
    rewards_BT = torch.where(learned_BT, rewards_BT, 0)
    if gamma == 1:
        return torch.where(learned_BT, rewards_BT.flip(-1).cumsum(dim=-1).flip(-1), 0)
    returns_BT = torch.zeros_like(rewards_BT)
    return_B = rewards_BT.new_zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        return_B = torch.where(learned_BT[:, t], rewards_BT[:, t] + gamma * return_B, return_B)
        returns_BT[:, t] = return_B
    return torch.where(learned_BT, returns_BT, 0)


def reinforce_plus_plus(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    gamma: float = 1.0,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++: discounted returns, whitened over all tokens of the batch.

    `A = whiten(g)`, `g_t = r_t + gamma g_next`. The KL penalty is meant to be in the reward.

    Args:
        token_level_rewards_BT: rewards per token; those at masked positions are skipped.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: not used: the baseline is the mean of the batch.
        valid_B: False for samples to leave out.
        gamma: discount per sampled token.
        sum_over_ranks: element-wise sum of a tensor over ranks.

    Returns:
        Advantages, and the discounted returns before whitening, [B, T].

    Raises:
        ValueError: gamma outside [0, 1].

    Source: REINFORCE++, https://arxiv.org/abs/2501.03262.
    """
    check_fractions(gamma=gamma)
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    returns_BT = discounted_returns(token_level_rewards_BT, learned_BT, gamma)
    return whiten(returns_BT, learned_BT, sum_over_ranks), returns_BT


def reinforce_plus_plus_baseline(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a baseline: `whiten(R - mean of the group)` over all tokens of the batch.

    The group is only the baseline; the scale is that of the batch. A lone sample keeps its reward before whitening.

    Args:
        token_level_rewards_BT: rewards per token; R is their sum over all positions.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        sum_over_ranks: element-wise sum of a tensor over ranks.

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
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """ReMax: the reward to go, minus the reward of a greedy response to the same prompt.

    `A_t = sum over s >= t of r_s - b`.

    Args:
        token_level_rewards_BT: rewards per token; those at masked positions are skipped.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: not used.
        valid_B: False for samples to leave out.
        baseline_rewards_B: reward of the greedy response to the prompt of each sample.
        sum_over_ranks: not used: there is no statistic of the batch.

    Returns:
        Advantages, and the rewards to go, [B, T]; both 0 at masked positions.

    Source: ReMax, https://arxiv.org/abs/2310.10505.
    """
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    returns_BT = discounted_returns(token_level_rewards_BT, learned_BT)
    return torch.where(learned_BT, returns_BT - baseline_rewards_B.unsqueeze(-1), 0), returns_BT
