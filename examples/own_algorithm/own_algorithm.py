"""A new algorithm: the median of the group is the baseline, and a penalty replaces the clip."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rl_plugins as rl


def median_baseline(
    *, token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups_B: Tensor, valid_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `R - median of the group` for every sampled token. The names of the arguments select the inputs."""
    rewards_B, same_BB = token_level_rewards_BT.sum(dim=-1), groups_B[:, None] == groups_B
    others_BB = torch.where(same_BB & valid_B, rewards_B, torch.nan)
    advantages_B = torch.where(valid_B, rewards_B - others_BB.nanmedian(dim=-1).values, 0)
    advantages_BT = advantages_B[:, None] * response_mask_BT
    return advantages_BT, advantages_BT


def penalized_ratio(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    strength: float = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `-A ratio + strength (log ratio)^2` per token."""
    log_ratio_BT = torch.where(response_mask_BT.bool(), log_probs_BT - old_log_probs_BT, 0)
    penalty_BT = strength * log_ratio_BT.square()
    return -advantages_BT * log_ratio_BT.exp() + penalty_BT, {"penalty": penalty_BT.detach()}


@dataclass(frozen=True)
class MedianPenalty(rl.Algorithm):
    """Algorithm with both functions and the options of every algorithm."""

    advantage: Any = median_baseline
    policy_loss: Any = penalized_ratio
