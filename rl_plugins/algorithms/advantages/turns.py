"""Advantages of the turns of a conversation: GiGPO, MT-GRPO and bi-level GAE.

A turn is one response of the policy in a conversation with tools or an environment. The reward of a turn is the sum of
the rewards of its learned tokens; a turn without such a token does not exist. A response without an environment is one
turn. The axis K counts the turns of the longest conversation.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.group_relative import grpo
from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.masked import group_statistics, learned_tokens, whiten
from rl_plugins.config.settings import FINITE, FROM_0_TO_1, check_ranges


class _Turns:
    """Turns of the samples.

    Args:
        turns_BT: number of the turn of each token.
        learned_BT: True on learned tokens.

    Attributes:
        exist_BK: True for turns with a learned token.
    """

    def __init__(self, turns_BT: Tensor, learned_BT: Tensor) -> None:
        self._learned_BT, self._turns_BT = learned_BT, torch.where(learned_BT, turns_BT, 0)
        self._count = int(self._turns_BT.max().item()) + 1 if turns_BT.numel() else 1
        self.exist_BK = self.sums(learned_BT.long()) > 0

    def sums(self, values_BT: Tensor) -> Tensor:
        """Sum the values of the learned tokens of each turn, [B, K]."""
        sums_BK = values_BT.new_zeros(len(values_BT), self._count)
        return sums_BK.scatter_add(1, self._turns_BT, torch.where(self._learned_BT, values_BT, 0))

    def largest(self, values_BT: Tensor) -> Tensor:
        """Return the largest integer among the learned tokens of each turn, int64 [B, K]."""
        least = torch.iinfo(torch.int64).min
        largest_BK = values_BT.new_full((len(values_BT), self._count), least)
        return largest_BK.scatter_reduce(
            1, self._turns_BT, torch.where(self._learned_BT, values_BT, least), reduce="amax"
        )

    def on_tokens(self, values_BK: Tensor) -> Tensor:
        """Copy the value of a turn to each of its learned tokens; 0 elsewhere, [B, T]."""
        return torch.where(self._learned_BT, values_BK.gather(1, self._turns_BT), 0)


def _compare(values_N: Tensor, keys_NX: Tensor, *, scaled: bool, eps: float) -> Tensor:
    """Compare values of the same key, `(x - mean) / (std + eps)` or `x - mean`, [N]; 0 for the only value of a key."""
    _, numbers_N = torch.unique(keys_NX, dim=0, return_inverse=True)
    groups = group_statistics(values_N, numbers_N, torch.ones_like(numbers_N, dtype=torch.bool))
    centred_N = values_N - groups.mean_B
    return torch.where(groups.count_B > 1, centred_N / (groups.std_B + eps) if scaled else centred_N, 0)


def gigpo(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    turns_BT: Tensor,
    states_BT: Tensor,
    gamma: float = 0.95,
    turn_weight: float = 1.0,
    scale: Literal["group", "none"] = "group",
    eps: float = 1e-6,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Group-in-group advantage: a response against its group, plus each turn against turns from the same state.

    `A = A_response + turn_weight A_turn`. `A_response` is the advantage of `grpo`. A turn k has the return
    `R_k = r_k + gamma R_next`, and `A_turn = (R_k - mean) / (std + eps)` over all turns of the group that begin in the
    same state, several turns of one sample included. The only turn from a state has `A_turn = 0`.

    Args:
        gamma: discount per turn, 0 to 1.
        turn_weight: weight of the advantages of turns.
        scale: divide both advantages by an unbiased standard deviation (`group`), or not at all (`none`).
        eps: constant added to the standard deviation.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Raises:
        ValueError: the scale is unknown, or `gamma` is outside [0, 1].

    Source: GiGPO, https://arxiv.org/abs/2505.10978, section 4.
    """
    check_ranges(float, FROM_0_TO_1, gamma=gamma)
    check_ranges(float, FINITE, turn_weight=turn_weight)
    if scale not in ("group", "none"):
        raise ValueError(f"scale={scale!r}: use 'group' or 'none'")
    responses_BT, _ = grpo(
        token_level_rewards_BT=token_level_rewards_BT,
        response_mask_BT=response_mask_BT,
        groups_B=groups_B,
        valid_B=valid_B,
        scale=scale,
        eps=eps,
        sum_over_ranks=sum_over_ranks,
    )
    turns = _Turns(turns_BT, learned_tokens(response_mask_BT, valid_B))
    returns_BK = turns.sums(token_level_rewards_BT)
    return_B = returns_BK.new_zeros(len(returns_BK))
    for k in reversed(range(returns_BK.shape[1])):
        return_B = torch.where(turns.exist_BK[:, k], returns_BK[:, k] + gamma * return_B, return_B)
        returns_BK[:, k] = return_B
    keys_BK2 = torch.stack([groups_B[:, None].expand_as(turns.exist_BK), turns.largest(states_BT)], dim=-1)
    advantages_BK = torch.zeros_like(returns_BK)
    advantages_BK[turns.exist_BK] = _compare(
        returns_BK[turns.exist_BK], keys_BK2[turns.exist_BK], scaled=scale == "group", eps=eps
    )
    advantages_BT = responses_BT + turn_weight * turns.on_tokens(advantages_BK)
    return advantages_BT, advantages_BT


def mt_grpo(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    turns_BT: Tensor,
    outcome_weight: float = 1.0,
    eps: float = 1e-6,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage of each turn: the reward of the turn, and the outcome, each against the group.

    The outcome is the reward of the last turn, or all rewards without a learned token. `A_outcome` is the outcome minus
    the mean of the group, divided by `std + eps`. `A_k` is the same for the rewards of turn k, over the samples of the
    group with a later turn; the only such sample has `A_k = 0`. Tokens of the last turn get `A_outcome`, and tokens of
    an earlier turn `A_k + outcome_weight A_outcome`. The paper has two turns; this is the same for any number.

    Args:
        outcome_weight: weight of the outcome for the turns before the last.
        eps: constant added to the standard deviation.
        sum_over_ranks: not used, because a group is on one rank.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Source: MT-GRPO, https://arxiv.org/abs/2505.11821v1, section 4.
    """
    check_ranges(float, FINITE, outcome_weight=outcome_weight)
    turns = _Turns(turns_BT, learned_tokens(response_mask_BT, valid_B))
    rewards_BK, exist_BK = turns.sums(token_level_rewards_BT), turns.exist_BK
    before_BK = exist_BK & (exist_BK.flip(-1).cumsum(dim=-1).flip(-1) > 1)
    last_B = torch.where(exist_BK & ~before_BK, rewards_BK, 0).sum(dim=-1)
    outcomes_B = torch.where(exist_BK.any(dim=-1), last_B, token_level_rewards_BT.sum(dim=-1))
    groups = group_statistics(outcomes_B, groups_B, valid_B)
    outcome_B1 = ((outcomes_B - groups.mean_B) / (groups.std_B + eps))[:, None]
    numbers_K = torch.arange(rewards_BK.shape[1], device=rewards_BK.device)
    keys_BK2 = torch.stack(torch.broadcast_tensors(groups_B[:, None], numbers_K), dim=-1)
    advantages_BK = torch.where(before_BK, outcome_weight * outcome_B1, outcome_B1)
    advantages_BK[before_BK] += _compare(rewards_BK[before_BK], keys_BK2[before_BK], scaled=True, eps=eps)
    advantages_BT = turns.on_tokens(advantages_BK)
    return advantages_BT, advantages_BT


def bilevel_gae(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    values_BT: Tensor,
    turns_BT: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_gamma: float = 0.95,
    turn_lam: float = 1.0,
    normalize: bool = True,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over turns, and over the tokens of each turn, whitened over the batch.

    Over the last tokens of the turns, backwards (0 after the last turn):
    `G_k = r_k + turn_gamma V_next - V_k + turn_gamma turn_lam G_next`. Over the other tokens of a turn, backwards:
    `G_t = r_t + gamma V_next - V_t + gamma lam G_next`, beginning with `G_k` at the last token. Then `A = whiten(G)`
    and `returns = G + V`. With one turn this is `gae`.

    Args:
        groups_B: not used.
        gamma: discount per token in a turn, 0 to 1.
        lam: weight of later tokens in a turn; 1 uses the rewards only, 0 the values only.
        turn_gamma: discount per turn, 0 to 1.
        turn_lam: weight of later turns, 0 to 1.
        normalize: False leaves out the whitening: `A = G`.

    Returns:
        Advantages, and the returns before whitening (the targets of the critic), [B, T].

    Raises:
        ValueError: a discount or a weight is outside [0, 1].

    Source: VAGEN, https://arxiv.org/abs/2510.16907, bi-level general advantage estimation.
    """
    check_ranges(float, FROM_0_TO_1, gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam)
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    rewards_BT = torch.where(learned_BT, token_level_rewards_BT, 0)
    values_BT = torch.where(learned_BT, values_BT.detach(), 0)
    gains_BT = torch.zeros_like(rewards_BT)
    gain_B = turn_gain_B = next_value_B = next_turn_value_B = rewards_BT.new_zeros(len(rewards_BT))
    next_turn_B = turns_BT.new_full((len(turns_BT),), -1)
    for t in reversed(range(rewards_BT.shape[1])):
        learned_B, reward_B, value_B, turn_B = learned_BT[:, t], rewards_BT[:, t], values_BT[:, t], turns_BT[:, t]
        ends_turn_B = learned_B & (turn_B != next_turn_B)
        end_B = reward_B + turn_gamma * next_turn_value_B - value_B + turn_gamma * turn_lam * turn_gain_B
        inside_B = reward_B + gamma * next_value_B - value_B + gamma * lam * gain_B
        turn_gain_B = torch.where(ends_turn_B, end_B, turn_gain_B)
        gain_B = torch.where(learned_B, torch.where(ends_turn_B, end_B, inside_B), gain_B)
        next_turn_value_B = torch.where(ends_turn_B, value_B, next_turn_value_B)
        next_value_B = torch.where(learned_B, value_B, next_value_B)
        next_turn_B = torch.where(learned_B, turn_B, next_turn_B)
        gains_BT[:, t] = gain_B
    returns_BT = torch.where(learned_BT, gains_BT + values_BT, 0)
    if not normalize:
        return torch.where(learned_BT, gains_BT, 0), returns_BT
    return whiten(gains_BT, learned_BT, sum_over_ranks), returns_BT
