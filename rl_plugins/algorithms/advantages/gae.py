"""Generalized advantage estimation: what the reward is worth beyond what a value function expected."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.interface import check_fractions, learned_tokens, one_rank
from rl_plugins.algorithms.masked import whiten


def gae(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    values_BT: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over sampled tokens, whitened over all tokens of the batch.

    Backwards over the sampled tokens of a response, `next` being the next one (0 after the last):
    `G_t = r_t + gamma V_next - V_t + gamma lam G_next`. Then `A = whiten(G)` and `returns = G + V`. Observations in
    between are skipped: their rewards and values do not count, and no step in time is taken. Masked positions hold 0,
    where some implementations leave whitened leftovers.

    Args:
        token_level_rewards_BT: rewards per token; those at masked positions are skipped, so the score of a response
            belongs on its last sampled token.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: not used.
        valid_B: False for samples to leave out.
        values_BT: the value function's expectation before each token; no gradient goes through it.
        gamma: discount per sampled token.
        lam: 1 trusts the rewards only, 0 the values only.
        sum_over_ranks: element-wise sum of a tensor over ranks.

    Returns:
        Advantages, and the returns before whitening (the targets of the value function), [B, T].

    Raises:
        ValueError: gamma or lam outside [0, 1].

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
        surprise_B = rewards_BT[:, t] + gamma * next_value_B - value_B
        gain_B = torch.where(learned_B, surprise_B + gamma * lam * gain_B, gain_B)
        next_value_B = torch.where(learned_B, value_B, next_value_B)
        gains_BT[:, t] = gain_B
    returns_BT = torch.where(learned_BT, gains_BT + values_BT, 0)
    return whiten(gains_BT, learned_BT, sum_over_ranks), returns_BT
