"""Masks, and statistics over the valid entries of a batch, of a row or of a group (the samples of one prompt).

Functions that take `sum_over_ranks` or `gather_over_ranks` are collective: every rank must call the function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins.algorithms.inputs import Collective

# Masks --------------------------------------------------------------------------------------------------------------


def zero_masked(response_mask_BT: Tensor, *tensors_BT: Tensor) -> tuple[Tensor, ...]:
    """Replace the values at masked positions, NaN included, by 0; masked positions get no gradient."""
    valid_BT = response_mask_BT.bool()
    return tuple(torch.where(valid_BT, tensor_BT, 0) for tensor_BT in tensors_BT)


def learned_tokens(response_mask_BT: Tensor, valid_B: Tensor) -> Tensor:
    """Return True on the sampled tokens of valid samples, bool [B, T]."""
    return response_mask_BT.bool() & valid_B.unsqueeze(-1)


def on_every_token(advantages_B: Tensor, response_mask_BT: Tensor, valid_B: Tensor) -> Tensor:
    """Copy the advantage of a sample to each of its sampled tokens; 0 elsewhere, [B, T]."""
    return torch.where(learned_tokens(response_mask_BT, valid_B), advantages_B.unsqueeze(-1), 0)


def last_valid(mask_BT: Tensor) -> Tensor:
    """Return True on the last valid position of each row, bool [B, T]; an empty row has no such position."""
    kept_BT = mask_BT.bool()
    return kept_BT & (kept_BT.flip(-1).cumsum(dim=-1).flip(-1) == 1)


# Statistics of rows and of the batch of all ranks -------------------------------------------------------------------


def sequence_means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Compute the mean of each row over its valid positions, [B]; NaN for a row without valid positions."""
    valid_BT = mask_BT.bool()
    return torch.where(valid_BT, values_BT, 0).sum(dim=-1) / valid_BT.sum(dim=-1)


def standard_deviation(values_N: Tensor, sum_over_ranks: Collective) -> Tensor:
    """Compute the unbiased standard deviation over the values of all ranks; 1 for at most one value. Collective."""
    values_N = values_N.double()
    total, count = sum_over_ranks(torch.stack([values_N.sum(), values_N.new_tensor(len(values_N))]))
    squares = sum_over_ranks((values_N - total / count.clamp(min=1)).square().sum())
    return (squares / (count - 1)).sqrt() if count > 1 else torch.ones_like(squares)


def whiten(values_BT: Tensor, mask_BT: Tensor, sum_over_ranks: Collective, eps: float = 1e-8) -> Tensor:
    """Compute `(x - mean) / sqrt(variance + eps)` over the valid tokens of all ranks; 0 elsewhere. Collective.

    The variance is unbiased; a single token is only centred. Sums are float64. The mean is subtracted twice (the
    second time to remove rounding errors of the first), so equal values give exactly 0.

    Args:
        values_BT: value of each token; masked entries may hold anything.
        mask_BT: 1 on valid tokens.
        sum_over_ranks: element-wise sum of a tensor over ranks.
        eps: constant added to the variance.

    Returns:
        Whitened values [B, T], in the type of `values_BT`.
    """
    valid_BT = mask_BT.bool()
    kept_BT = torch.where(valid_BT, values_BT, 0).double()
    total, count = sum_over_ranks(torch.stack([kept_BT.sum(), valid_BT.sum().double()]))
    deviation_BT = torch.where(valid_BT, kept_BT - total / count.clamp(min=1), 0)
    rest, squares = sum_over_ranks(torch.stack([deviation_BT.sum(), deviation_BT.square().sum()]))
    mean_of_rest = rest / count.clamp(min=1)
    variance = ((squares - rest * mean_of_rest) / (count - 1).clamp(min=1)).clamp(min=0)
    scale = torch.where(count > 1, (variance + eps).rsqrt(), 1.0)
    return torch.where(valid_BT, (deviation_BT - mean_of_rest) * scale, 0).to(values_BT.dtype)


def largest(values_N: Tensor, count: int, gather_over_ranks: Collective) -> Tensor:
    """Return the `count` largest values of all ranks, or all values if fewer exist, in descending order. Collective.

    No rank sends more than `count` values.
    """
    own_N = values_N.topk(min(count, len(values_N))).values
    all_N = gather_over_ranks(own_N)
    return all_N.topk(min(count, len(all_N))).values


# Statistics of groups -----------------------------------------------------------------------------------------------


def group_numbers(groups_B: Tensor) -> tuple[Tensor, int]:
    """Number the groups from 0 without gaps; return the number of each sample's group [B] and the count of groups."""
    _, group_of_B = torch.unique(groups_B, return_inverse=True)
    return group_of_B, int(group_of_B.max().item()) + 1 if group_of_B.numel() else 0


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of the group of each sample; every tensor has shape [B]."""

    mean_B: Tensor
    std_B: Tensor
    count_B: Tensor


def group_statistics(values_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> GroupStatistics:
    """Compute mean, unbiased standard deviation and size of each sample's group, over its valid samples.

    A group with a single valid sample has mean 0 and standard deviation 1, so the value of the sample stays unchanged
    (the convention of verl's estimators). Equal values have exactly their value as mean and 0 as standard deviation:
    a rounding error in the numerator, divided by `0 + eps`, would give a large advantage.
    """
    group_of_B, num_groups = group_numbers(groups_B)
    weight_B = valid_B.to(values_B.dtype)
    lowest_G = values_B.new_full((num_groups,), torch.inf)
    lowest_G.scatter_reduce_(0, group_of_B, values_B.masked_fill(~valid_B, torch.inf), "amin")
    above_lowest_B = torch.where(valid_B, values_B - lowest_G[group_of_B], 0)

    def group_sum(x_B: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=values_B.dtype, device=values_B.device).index_add_(0, group_of_B, x_B)

    count_G = group_sum(weight_B)
    mean_above_G = group_sum(above_lowest_B) / count_G.clamp(min=1)
    deviation_B = (above_lowest_B - mean_above_G[group_of_B]) * weight_B
    std_G = (group_sum(deviation_B.square()) / (count_G - 1).clamp(min=1)).sqrt()
    alone_G = count_G <= 1
    mean_G = (lowest_G + mean_above_G).masked_fill(alone_G, 0.0)
    std_G = std_G.masked_fill(alone_G, 1.0)
    return GroupStatistics(mean_G[group_of_B], std_G[group_of_B], count_G[group_of_B])


def group_leaders(values_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> tuple[Tensor, Tensor]:
    """Find the sample that alone has the largest value of its group, and the next smaller value of the group.

    Only valid samples count. A group in which several samples have the largest value has no leader.

    Returns:
        leads_B (bool) and runner_up_B (-inf if no valid sample of the group has a smaller value).
    """
    group_of_B, num_groups = group_numbers(groups_B)

    def largest_of_group(x_B: Tensor) -> Tensor:
        return x_B.new_full((num_groups,), -torch.inf).scatter_reduce_(0, group_of_B, x_B, "amax")[group_of_B]

    valid_values_B = values_B.masked_fill(~valid_B, -torch.inf)
    largest_B = valid_B & (valid_values_B == largest_of_group(valid_values_B))
    shared_by_G = torch.zeros(num_groups, dtype=torch.long, device=values_B.device)
    shared_by_G.index_add_(0, group_of_B, largest_B.long())
    runner_up_B = largest_of_group(valid_values_B.masked_fill(largest_B, -torch.inf))
    return largest_B & (shared_by_G[group_of_B] == 1), runner_up_B


def group_ranks(values_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> Tensor:
    """Number the samples of each group from 0, the largest value first and invalid samples last, int64 [B].

    Of samples with the same value, the first one has the smaller number.
    """
    group_of_B, num_groups = group_numbers(groups_B)
    order_B = values_B.masked_fill(~valid_B, -torch.inf).argsort(descending=True, stable=True)
    order_B = order_B[group_of_B[order_B].argsort(stable=True)]
    sizes_G = torch.bincount(group_of_B, minlength=num_groups)
    starts_G = sizes_G.cumsum(dim=0) - sizes_G
    positions_B = torch.arange(len(values_B), device=values_B.device)
    return torch.empty_like(order_B).scatter_(0, order_B, positions_B - starts_G[group_of_B[order_B]])


def rewards_of_tokens(
    scores_B: Tensor, token_level_scores_BT: Tensor | None, mask_BT: Tensor, valid_B: Tensor
) -> Tensor:
    """Divide the scores among the tokens, [B, T], float64.

    The reward of a token is its part of the score. The reward of a masked token goes to the learned token before,
    because later tokens did not earn the reward; without a learned token before, the reward stays where no token learns
    from it. The last learned token, or the first position without such a token, gets the rest of the score.

    Args:
        scores_B: score of each sample, 0 for samples that are not valid.
        token_level_scores_BT: parts of the score by token; None if no token but the last has a reward.
        mask_BT: 1 for learned tokens.
        valid_B: False for samples without a score.
    """
    # In float32, the rewards of tokens would not add up to the score, and a group with equal scores would get
    # advantages of the rounding errors.
    rewards_BT = torch.zeros_like(mask_BT, dtype=torch.float64)
    if mask_BT.shape[1] == 0:
        return rewards_BT
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_B1 = (mask_BT.bool() * positions_T).amax(dim=-1, keepdim=True)
    if token_level_scores_BT is not None:
        before_BT = torch.where(mask_BT.bool(), positions_T, -1).cummax(dim=-1).values
        target_BT = torch.where(before_BT < 0, positions_T, before_BT)
        counted_BT = valid_B[:, None] & (target_BT < last_B1)
        rewards_BT = rewards_BT.scatter_add(1, target_BT, torch.where(counted_BT, token_level_scores_BT.double(), 0))
    final_B = scores_B.double() - rewards_BT.sum(dim=-1)
    return torch.where(positions_T == last_B1, final_B[:, None], rewards_BT)
