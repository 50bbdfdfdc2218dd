"""Advantages from returns: the rewards after each token, with a critic (GAE) or without (REINFORCE++, ReMax).

Rewards count only on sampled tokens. A masked position is skipped with its reward, and an observation between two
tokens is no step of the discount. So the score of a response belongs on its last sampled token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.checks import check_fractions
from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.masked import group_statistics, learned_tokens, on_every_token, whiten


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

    Returns:
        Advantages, and the returns before whitening (the targets of the critic), [B, T].

    Raises:
        ValueError: `gamma` or `lam` is outside [0, 1].

    Source: https://arxiv.org/abs/1506.02438, equation 16.
    """
    check_fractions(gamma=gamma, lam=lam)
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
