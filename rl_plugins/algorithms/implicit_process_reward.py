"""Implicit process rewards: a language model that is trained to tell good responses from bad ones rewards every token.

The model's return of a response is `beta` times its log-probability minus that of a frozen reference, summed over the
tokens that the policy sampled. Trained on the outcomes of whole responses, each token's part of the sum is the reward
of that token: nobody has to label steps. Observations between the tokens are skipped, as they are in returns.

Source: PRIME, https://arxiv.org/abs/2502.01456; what the paper leaves open is taken from its code,
https://github.com/volcengine/verl, `recipe/prime`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from rl_plugins.algorithms.advantages.prime import last_of
from rl_plugins.algorithms.advantages.returns import discounted_returns
from rl_plugins.algorithms.masked import group_numbers

Granularity = Literal["token", "whole"]
GRANULARITIES: tuple[Granularity, ...] = ("token", "whole")


# Rewards ------------------------------------------------------------------------------------------------------------


def process_rewards(
    *,
    log_probs_BT: Tensor,
    reference_log_probs_BT: Tensor,
    response_mask_BT: Tensor,
    outcomes_B: Tensor | None = None,
    beta: float = 0.05,
    lam: float = 0.0,
    granularity: Granularity = "token",
) -> Tensor:
    """The reward of each token, [B, T]; 0 at masked positions.

    `p_t = q_t + lam p_next`, `q_t = beta (log_probs - reference_log_probs)`, and `next` the next sampled token. With
    `lam` 0 that is `q_t` alone. Given outcomes, the last `q` is first set to what makes the sum of all the outcome;
    with `lam` 0 and granularity `token` it would change nothing.

    With granularity `token` the last sampled token gets nothing: it is where the outcome is. (The paper's formula gives
    it its `p`; its code does not.) With `whole` it gets the sum of all `p`, and the other tokens get nothing.

    Args:
        log_probs_BT: of the process reward model.
        reference_log_probs_BT: of its frozen reference.
        response_mask_BT: 1 on tokens that the policy sampled; others may hold anything.
        outcomes_B: the outcome of each sample.
        beta: reward of one nat.
        lam: share of the rewards of later tokens that a token gets, too.
        granularity: `token` or `whole`.

    Raises:
        ValueError: an unknown granularity, beta not above 0, or lam outside [0, 1].
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r}: use one of {', '.join(GRANULARITIES)}")
    if not beta > 0:
        raise ValueError(f"beta={beta}: must be above 0")
    if not 0 <= lam <= 1:
        raise ValueError(f"lam={lam}: use a number from 0 to 1")
    sampled_BT = response_mask_BT.bool()
    last_BT = last_of(sampled_BT)
    rewards_BT = torch.where(sampled_BT, beta * (log_probs_BT - reference_log_probs_BT), 0)
    if outcomes_B is not None:
        others_B = rewards_BT.masked_fill(last_BT, 0).sum(dim=-1)
        rewards_BT = torch.where(last_BT, (outcomes_B - others_B)[:, None].to(rewards_BT), rewards_BT)
    if lam > 0:
        rewards_BT = discounted_returns(rewards_BT, sampled_BT, lam)
    if granularity == "whole":
        return torch.where(last_BT, rewards_BT.sum(dim=-1, keepdim=True), 0)
    return rewards_BT.masked_fill(last_BT, 0)


def normalized(
    *,
    process_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    max_over_ranks: Callable[[Tensor], Tensor],
    eps: float = 1e-6,
) -> Tensor:
    """Process rewards divided by the largest reward to go, `max |sum over s >= t of p_s| + eps`, of all ranks, [B, T].

    The maximum is that of the batch of all ranks, so that the rewards do not depend on how it is dealt to them. (The
    paper's code takes the maximum of each rank.) Collective.

    Args:
        process_rewards_BT: of `process_rewards`.
        response_mask_BT: 1 on tokens that the policy sampled; others may hold anything.
        max_over_ranks: element-wise maximum of a tensor over ranks.
        eps: added to the maximum.
    """
    sampled_BT = response_mask_BT.bool()
    to_go_BT = discounted_returns(process_rewards_BT, sampled_BT).double().abs()
    # A rank without tokens takes part, too.
    largest_1 = torch.cat([to_go_BT.flatten(), to_go_BT.new_zeros(1)]).max().reshape(1)
    divisor_1 = max_over_ranks(largest_1) + eps
    return torch.where(sampled_BT, process_rewards_BT.double() / divisor_1, 0).to(process_rewards_BT.dtype)


# Training -----------------------------------------------------------------------------------------------------------


def process_returns(
    *, log_probs_BT: Tensor, reference_log_probs_BT: Tensor, response_mask_BT: Tensor, beta: float = 0.05
) -> Tensor:
    """The model's return of each response, `beta sum_t (log_probs - reference_log_probs)`, [B]; with gradient.

    Args:
        log_probs_BT: of the process reward model, with gradient.
        reference_log_probs_BT: of its frozen reference.
        response_mask_BT: 1 on tokens that the policy sampled; others may hold anything.
        beta: reward of one nat.
    """
    sampled_BT = response_mask_BT.bool()
    return beta * torch.where(sampled_BT, log_probs_BT - reference_log_probs_BT, 0).sum(dim=-1)


def outcome_cross_entropy(*, returns_B: Tensor, outcomes_B: Tensor) -> Tensor:
    """Cross-entropy of the outcomes and `sigmoid(returns)`, the probability of success, [B].

    Args:
        returns_B: of `process_returns`, with gradient.
        outcomes_B: from 0 (failure) to 1 (success).

    Source: PRIME, https://arxiv.org/abs/2502.01456.
    """
    return binary_cross_entropy_with_logits(returns_B, outcomes_B.to(returns_B), reduction="none")


def outcome_preference(
    *, returns_B: Tensor, outcomes_B: Tensor, opponents_B: Tensor, weights_B: Tensor | None = None
) -> Tensor:
    """DPO of a response against those of the other outcome to the same prompt, which stand still, [B].

    `-log sigmoid(return - opponent)` for a success (an outcome above 0), `-log sigmoid(opponent - return)` for a
    failure; times the weight. Take the mean over the samples of the mini-batch. (The paper's code adds weighted losses
    up within a micro-batch, so that they grow with its size.)

    Args:
        returns_B: of `process_returns`, with gradient.
        outcomes_B: from 0 (failure) to 1 (success).
        opponents_B: of `opponents`, without gradient.
        weights_B: of `best_of_n_weights`; 1 by default.
    """
    signs_B = torch.where(outcomes_B > 0, 1.0, -1.0).to(returns_B)
    loss_B = softplus(-signs_B * (returns_B - opponents_B.to(returns_B)))
    return loss_B if weights_B is None else weights_B.to(loss_B) * loss_B


def opponents(*, returns_B: Tensor, outcomes_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> Tensor:
    """What each sample is compared with: the mean return of the samples of its group with the other outcome, [B].

    For a success (an outcome above 0) those are the samples with a lower outcome, for a failure those with a higher
    one; 0 where there are none.

    Args:
        returns_B: of the model before the update.
        outcomes_B: from 0 (failure) to 1 (success).
        groups_B: the prompt that each sample answers; all samples of a group are here.
        valid_B: False for samples to leave out.
    """
    difference_BB = outcomes_B[:, None] - outcomes_B[None, :]
    other_BB = torch.where((outcomes_B > 0)[:, None], difference_BB > 0, difference_BB < 0)
    other_BB = other_BB & _siblings(groups_B, valid_B)
    sums_B = torch.where(other_BB, returns_B.detach()[None, :], 0).sum(dim=-1)
    return sums_B / other_BB.sum(dim=-1).clamp(min=1)


def best_of_n_weights(*, values_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> Tensor:
    """How much more often a sample is the best of n than drawn at random: `n P(value of a sibling <= own)^(n-1)`, [B].

    n is the number of valid samples of the group, the sample itself among them; 0 for samples to leave out.

    Args:
        values_B: what best means: the outcomes, or the model's returns before the update.
        groups_B: the prompt that each sample answers; all samples of a group are here.
        valid_B: False for samples to leave out.
    """
    siblings_BB = _siblings(groups_B, valid_B)
    count_B = siblings_BB.sum(dim=-1)
    not_above_B = (siblings_BB & (values_B.detach()[None, :] <= values_B.detach()[:, None])).sum(dim=-1)
    share_B = not_above_B.to(values_B.dtype) / count_B.clamp(min=1)
    return count_B * share_B ** (count_B - 1).clamp(min=0)


def _siblings(groups_B: Tensor, valid_B: Tensor) -> Tensor:
    """Which pairs of valid samples answer the same prompt, a sample and itself included, bool [B, B]."""
    group_of_B, _ = group_numbers(groups_B)
    return (group_of_B[:, None] == group_of_B[None, :]) & valid_B[:, None] & valid_B[None, :]
