"""Advantage estimators: rewards in, advantages and returns out, both [B, T].

Every estimator takes the token-level rewards (the score on the last token, minus a KL penalty if there is
one), the response mask, the group of each sample, which samples are valid, and `sum_over_ranks` for statistics
of the whole batch. Samples of one prompt share a group and a rank. An invalid sample (its reward failed) counts
in no statistic and gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rl_plugins.algorithms.masked import group_statistics, standard_deviation

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor]]


def one_rank(values: Tensor) -> Tensor:
    """`sum_over_ranks` where there is one rank."""
    return values


def grpo(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-6,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage: `(R - mean of the group) / (std + eps)`, the same for every token of a sample.

    Args:
        token_level_rewards_BT: rewards per token; R is their sum over all positions, because the score of a
            response that is empty or ends in an observation sits on a masked one.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        scale: divide by the unbiased standard deviation of the group, of the batch of all ranks, or not at
            all (`none` is Dr.GRPO, https://arxiv.org/abs/2503.20783).
        eps: added to the standard deviation.
        sum_over_ranks: element-wise sum of a tensor over ranks.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    groups = group_statistics(rewards_B, groups_B, valid_B)
    advantages_B = rewards_B - groups.mean_B
    if scale == "group":
        advantages_B = advantages_B / (groups.std_B + eps)
    elif scale == "batch":
        advantages_B = advantages_B / (standard_deviation(rewards_B[valid_B], sum_over_ranks) + eps)
    elif scale != "none":
        raise ValueError(f"scale={scale!r}: use 'group', 'batch' or 'none'")
    advantages_BT = torch.where(valid_B, advantages_B, 0).unsqueeze(-1) * response_mask_BT
    return advantages_BT, advantages_BT


ADVANTAGES: dict[str, AdvantageEstimator] = {"grpo": grpo}
