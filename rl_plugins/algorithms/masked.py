"""Statistics over the valid entries of a batch, and over the samples of one prompt (a group)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` is 1; 0 where nothing is valid. Masked entries may hold anything, NaN too."""
    return torch.where(mask.bool(), values, 0).sum() / mask.sum().clamp(min=1)


def standard_deviation(values_N: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Unbiased standard deviation over the values of all ranks; 1 if there is at most one. Collective."""
    values_N = values_N.double()
    total, count = sum_over_ranks(torch.stack([values_N.sum(), values_N.new_tensor(len(values_N))]))
    squares = sum_over_ranks((values_N - total / count.clamp(min=1)).square().sum())
    return (squares / (count - 1)).sqrt() if count > 1 else torch.ones_like(squares)


def whiten(values_BT: Tensor, mask_BT: Tensor, sum_over_ranks: Callable[[Tensor], Tensor], eps: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(variance + eps)` over the valid tokens of all ranks; 0 at masked positions. Collective.

    The variance is unbiased; a single token is centred only. Sums are float64, and the mean is taken twice (the second
    time of what is left after subtracting the first), so that equal values come out as 0.

    Args:
        values_BT: per-token values; masked entries may hold anything.
        mask_BT: 1 on tokens that count.
        sum_over_ranks: element-wise sum of a tensor over ranks.
        eps: added to the variance.

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


def sequence_means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean of each row over its valid positions [B]; NaN in a row without one."""
    valid_BT = mask_BT.bool()
    return torch.where(valid_BT, values_BT, 0).sum(dim=-1) / valid_BT.sum(dim=-1)


def group_numbers(groups_B: Tensor) -> tuple[Tensor, int]:
    """The groups of the samples, numbered from 0 without gaps [B], and how many there are."""
    _, group_of_B = torch.unique(groups_B, return_inverse=True)
    return group_of_B, int(group_of_B.max().item()) + 1 if group_of_B.numel() else 0


@dataclass(frozen=True)
class GroupStatistics:
    """Per-sample view of its group's statistics; every tensor has shape [B]."""

    mean_B: Tensor
    std_B: Tensor
    count_B: Tensor


def group_statistics(values_B: Tensor, groups_B: Tensor, valid_B: Tensor) -> GroupStatistics:
    """Mean, unbiased standard deviation and size of each sample's group, over its valid members only.

    A group with a single valid member has mean 0 and standard deviation 1, so that its value passes through
    unchanged (the convention of verl's estimators). Equal values have exactly their value as mean and 0 as
    standard deviation: a rounding error there, divided by 0 + eps, would teach something.
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
    """Who alone has the largest value of its group, and what the next smaller value of the group is.

    Only valid samples are looked at. A group whose largest value is shared has no leader.

    Returns:
        leads_B (bool) and runner_up_B (-inf where no valid sample of the group has a smaller value).
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
