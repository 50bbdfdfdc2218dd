"""Implicit process rewards: a language model trained on outcomes gives a reward for every token.

The return of a response under the model is `beta` times its log-probability minus the log-probability under a frozen
reference, summed over the tokens that the policy sampled. The model is trained on the outcomes of whole responses;
then the term of each token in the sum is the reward of the token, without labels of steps. Observations between the
tokens are skipped, as in returns.

Source: PRIME, https://arxiv.org/abs/2502.01456; details that the paper leaves open are from its code,
https://github.com/volcengine/verl, `recipe/prime`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from rl_plugins.algorithms.advantages.returns import discounted_returns
from rl_plugins.algorithms.inputs import Collective
from rl_plugins.algorithms.masked import group_numbers, last_valid
from rl_plugins.config.settings import ABOVE_0, FROM_0_TO_1, check_ranges

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
    """Compute the reward of each token, [B, T]; 0 at masked positions.

    `p_t = q_t + lam p_next`, `q_t = beta (log_probs - reference_log_probs)`, and `next` the next sampled token. With
    `lam` 0 the reward is `q_t`. If outcomes are given, the last `q` is first set to the value at which the sum of all
    `q` is the outcome; with `lam` 0 and granularity `token` this has no effect.

    With granularity `token` the last sampled token gets 0, because the outcome is there. (The paper's formula gives the
    last token its `p`; the paper's code does not.) With `whole` the last sampled token gets the sum of all `p`, and
    every other token gets 0.

    Args:
        log_probs_BT: log-probability of each token under the process reward model.
        beta: reward per nat, above 0.
        lam: share of the reward of the next token that a token also gets, 0 to 1.
        granularity: `token` or `whole`.

    Raises:
        ValueError: the granularity is unknown, `beta` is not above 0, or `lam` is outside [0, 1].
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r}: use one of {', '.join(GRANULARITIES)}")
    check_ranges(float, ABOVE_0, beta=beta)
    check_ranges(float, FROM_0_TO_1, lam=lam)
    sampled_BT = response_mask_BT.bool()
    last_BT = last_valid(sampled_BT)
    rewards_BT = torch.where(sampled_BT, beta * (log_probs_BT - reference_log_probs_BT), 0)
    if outcomes_B is not None:
        earlier_B = rewards_BT.masked_fill(last_BT, 0).sum(dim=-1)
        rewards_BT = torch.where(last_BT, (outcomes_B - earlier_B)[:, None].to(rewards_BT), rewards_BT)
    if lam > 0:
        rewards_BT = discounted_returns(rewards_BT, sampled_BT, lam)
    if granularity == "whole":
        return torch.where(last_BT, rewards_BT.sum(dim=-1, keepdim=True), 0)
    return rewards_BT.masked_fill(last_BT, 0)


def normalized(
    *,
    process_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    max_over_ranks: Collective,
    eps: float = 1e-6,
) -> Tensor:
    """Divide process rewards by the largest reward to go, `max |sum over s >= t of p_s| + eps`, of all ranks, [B, T].

    The maximum is over the batch of all ranks, so that the rewards do not depend on the distribution of samples to
    ranks. (The paper's code takes the maximum of each rank.) Collective.

    Args:
        process_rewards_BT: rewards from `process_rewards`.
        eps: constant added to the maximum.
    """
    sampled_BT = response_mask_BT.bool()
    to_go_BT = discounted_returns(process_rewards_BT, sampled_BT).double().abs()
    # A rank without tokens also takes part in the collective.
    largest_1 = torch.cat([to_go_BT.flatten(), to_go_BT.new_zeros(1)]).max().reshape(1)
    divisor_1 = max_over_ranks(largest_1) + eps
    return torch.where(sampled_BT, process_rewards_BT.double() / divisor_1, 0).to(process_rewards_BT.dtype)


# Training -----------------------------------------------------------------------------------------------------------


def process_returns(
    *, log_probs_BT: Tensor, reference_log_probs_BT: Tensor, response_mask_BT: Tensor, beta: float = 0.05
) -> Tensor:
    """Compute the model's return of each response, `beta sum_t (log_probs - reference_log_probs)`, [B], with gradient.

    Args:
        log_probs_BT: log-probability of each token under the process reward model, with gradient.
        beta: reward per nat.
    """
    sampled_BT = response_mask_BT.bool()
    return beta * torch.where(sampled_BT, log_probs_BT - reference_log_probs_BT, 0).sum(dim=-1)


def outcome_cross_entropy(*, returns_B: Tensor, outcomes_B: Tensor) -> Tensor:
    """Cross-entropy of the outcomes and `sigmoid(returns)`, the probability of success, [B].

    Args:
        returns_B: returns from `process_returns`, with gradient.

    Source: PRIME, https://arxiv.org/abs/2502.01456.
    """
    return binary_cross_entropy_with_logits(returns_B, outcomes_B.to(returns_B), reduction="none")


def outcome_preference(
    *, returns_B: Tensor, outcomes_B: Tensor, opponents_B: Tensor, weights_B: Tensor | None = None
) -> Tensor:
    """DPO of a response against the responses to the same prompt with the opposite outcome, [B].

    `-log sigmoid(return - opponent)` for a success (an outcome above 0), `-log sigmoid(opponent - return)` for a
    failure; times the weight. No gradient flows into the opponents. Take the mean over the samples of the mini-batch.
    (The paper's code adds weighted losses within a micro-batch, so the loss grows with the size of the micro-batch.)

    Args:
        returns_B: returns from `process_returns`, with gradient.
        opponents_B: returns to compare with, from `opponents`, without gradient.
        weights_B: weights from `best_of_n_weights`; None for 1.
    """
    signs_B = torch.where(outcomes_B > 0, 1.0, -1.0).to(returns_B)
    loss_B = softplus(-signs_B * (returns_B - opponents_B.to(returns_B)))
    return loss_B if weights_B is None else weights_B.to(loss_B) * loss_B


def opponents(*, returns_B: Tensor, outcomes_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> Tensor:
    """Compute the mean return of the samples of the group with the opposite outcome, [B]; 0 if no such sample exists.

    For a success (an outcome above 0), all samples with a lower outcome count; for a failure, all samples with a higher
    outcome.

    Args:
        returns_B: returns of the model before the update.
        groups_B: number of the prompt that each sample answers; the batch must hold all samples of each group.
    """
    difference_BB = outcomes_B[:, None] - outcomes_B[None, :]
    opposite_BB = torch.where((outcomes_B > 0)[:, None], difference_BB > 0, difference_BB < 0)
    opposite_BB = opposite_BB & _same_group(groups_B, valid_B)
    sums_B = torch.where(opposite_BB, returns_B.detach()[None, :], 0).sum(dim=-1)
    return sums_B / opposite_BB.sum(dim=-1).clamp(min=1)


def best_of_n_weights(*, values_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> Tensor:
    """Compute how much likelier a sample is the best of n than a random sample, [B]; 0 for samples to leave out.

    `n P(value of a sample of the group <= own value)^(n - 1)`, with n the number of valid samples of the group, the
    sample itself included.

    Args:
        values_B: values to compare: the outcomes, or the model's returns before the update.
        groups_B: number of the prompt that each sample answers; the batch must hold all samples of each group.
    """
    same_group_BB = _same_group(groups_B, valid_B)
    count_B = same_group_BB.sum(dim=-1)
    not_above_B = (same_group_BB & (values_B.detach()[None, :] <= values_B.detach()[:, None])).sum(dim=-1)
    share_B = not_above_B.to(values_B.dtype) / count_B.clamp(min=1)
    return count_B * share_B ** (count_B - 1).clamp(min=0)


def _same_group(groups_B: Tensor, valid_B: Tensor) -> Tensor:
    """Return True for pairs of valid samples of one group, a sample with itself included, bool [B, B]."""
    group_of_B, _ = group_numbers(groups_B)
    return (group_of_B[:, None] == group_of_B[None, :]) & valid_B[:, None] & valid_B[None, :]
