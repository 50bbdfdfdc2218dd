"""Advantages of samples relative to the other samples of their prompt: one number for all tokens of a sample.

R is the sum of a sample's token-level rewards over all positions, because the score of a response that is empty or
ends in an observation sits on a masked one. A group with a single valid sample has mean 0 and standard deviation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.interface import learned_tokens, on_every_token, one_rank
from rl_plugins.algorithms.masked import group_leaders, group_statistics, standard_deviation, whiten


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

    Raises:
        ValueError: an unknown scale.

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
    advantages_BT = on_every_token(advantages_B, response_mask_BT, valid_B)
    return advantages_BT, advantages_BT


def grpo_passk(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    normalize: bool = True,
    eps: float = 1e-6,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """Only the best sample of a group learns: its lead over the second best; for training the best of k.

    `a = (R_best - R_second) / (std + eps)` for the best sample, 0 for all others, and for all where the best is
    shared. A group with a single valid sample has no second best: 0. (Elsewhere that is an error; here a reward that
    failed can leave one.)

    Args:
        token_level_rewards_BT: rewards per token; R is their sum over all positions.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        normalize: divide by the unbiased standard deviation of the group.
        eps: added to the standard deviation.
        sum_over_ranks: not used: a group is on one rank.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Source: https://arxiv.org/abs/2503.19595.
    """
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    groups = group_statistics(rewards_B, groups_B, valid_B)
    leads_B, runner_up_B = group_leaders(rewards_B, groups_B, valid_B)
    advantages_B = torch.where(leads_B & (groups.count_B > 1), rewards_B - runner_up_B, 0)
    if normalize:
        advantages_B = advantages_B / (groups.std_B + eps)
    advantages_BT = on_every_token(advantages_B, response_mask_BT, valid_B)
    return advantages_BT, advantages_BT


def rloo(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out: R minus the mean of the others, `n / (n - 1) (R - mean of the group)`.

    A lone sample keeps its reward, as in every estimator here. (Two versions are in use that disagree on it; the other
    gives 0.)

    Args:
        token_level_rewards_BT: rewards per token; R is their sum over all positions.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        sum_over_ranks: not used: a group is on one rank.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Source: https://arxiv.org/abs/2402.14740.
    """
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    groups = group_statistics(rewards_B, groups_B, valid_B)
    factor_B = torch.where(groups.count_B > 1, groups.count_B / (groups.count_B - 1).clamp(min=1), 1)
    advantages_BT = on_every_token(factor_B * (rewards_B - groups.mean_B), response_mask_BT, valid_B)
    return advantages_BT, advantages_BT


def opo(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """R minus the mean of the group weighted by length, `sum_j L_j R_j / sum_j L_j`: the baseline of least variance.

    L counts sampled tokens. (It is least where the squared gradient norm of a response is proportional to its length.)
    A lone sample keeps its reward.

    Args:
        token_level_rewards_BT: rewards per token; R is their sum over all positions.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        sum_over_ranks: not used: a group is on one rank.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Source: OPO, https://arxiv.org/abs/2505.23585.
    """
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    groups = group_statistics(rewards_B, groups_B, valid_B)
    # From the mean, so that equal rewards have exactly their value as baseline.
    centred_B = rewards_B - groups.mean_B
    lengths_B = learned_tokens(response_mask_BT, valid_B).sum(dim=-1).to(rewards_B.dtype)
    # Means of products are sums of products here: the sizes cancel. A lone sample's mean is 0, and so is its baseline.
    weighted_mean_B = group_statistics(lengths_B * centred_B, groups_B, valid_B).mean_B
    mean_length_B = group_statistics(lengths_B, groups_B, valid_B).mean_B
    baseline_B = torch.where(mean_length_B > 0, weighted_mean_B / mean_length_B, 0)
    advantages_BT = on_every_token(centred_B - baseline_B, response_mask_BT, valid_B)
    return advantages_BT, advantages_BT


def gpg(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    norm: float = 1.0,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """Group policy gradient: `alpha (R - mean of the group) / norm`, `alpha = samples / samples with R != 0`.

    alpha makes up for samples without a signal, over the batch of all ranks (at least one is counted). It counts
    rewards that are not 0, as the common implementation does, not advantages: with a KL penalty in the reward it is
    about 1.

    Args:
        token_level_rewards_BT: rewards per token; R is their sum over all positions.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        norm: a constant to divide by.
        sum_over_ranks: element-wise sum of a tensor over ranks.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Raises:
        ValueError: norm is not positive.

    Source: GPG, https://arxiv.org/abs/2504.02546.
    """
    if norm <= 0:
        raise ValueError(f"norm={norm}: use a positive number")
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    groups = group_statistics(rewards_B, groups_B, valid_B)
    counts = torch.stack([valid_B.sum(), (valid_B & (rewards_B != 0)).sum()]).double()
    samples, with_reward = sum_over_ranks(counts)
    alpha = (samples / with_reward.clamp(min=1)).to(rewards_B.dtype)
    advantages_BT = on_every_token(alpha * (rewards_B - groups.mean_B) / norm, response_mask_BT, valid_B)
    return advantages_BT, advantages_BT


def max_rl(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    eps: float = 1e-6,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """Maximum likelihood RL: `(R - mean of the group) / (mean of the group + eps)`, for rewards of at least 0.

    Climbs the log of the success rate rather than the success rate, so that a prompt counts more the rarer its
    successes are. With rewards 0 and 1 it is the mean gradient of the successful samples, an unbiased gradient of the
    expansion of the log to as many terms as the group has samples. A group whose mean is not positive (no success)
    gets 0, and so does a lone sample.

    Args:
        token_level_rewards_BT: rewards per token; R is their sum over all positions.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        eps: added to the mean.
        sum_over_ranks: not used: a group is on one rank.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Source: MaxRL, https://arxiv.org/abs/2602.02710.
    """
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    mean_B = group_statistics(rewards_B, groups_B, valid_B).mean_B
    advantages_B = torch.where(mean_B > 0, (rewards_B - mean_B) / (mean_B + eps), 0)
    advantages_BT = on_every_token(advantages_B, response_mask_BT, valid_B)
    return advantages_BT, advantages_BT


def gdpo(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    component_rewards_BK: Tensor | None = None,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> tuple[Tensor, Tensor]:
    """Several rewards, each made group-relative by itself: `whiten(sum_k w_k GRPO(R^k))` over the tokens of the batch.

    So different combinations of rewards with the same sum keep different advantages. Without components it is GRPO
    followed by whitening.

    Args:
        token_level_rewards_BT: rewards per token, used only without components (so a KL penalty in the reward has no
            effect with them); R is their sum over all positions.
        response_mask_BT: 1 on tokens that the policy sampled.
        groups_B: the prompt that each sample answers.
        valid_B: False for samples to leave out.
        component_rewards_BK: [B, K], the K rewards of each sample.
        weights: one for each component; 1 by default.
        eps: added to the standard deviation of the group.
        sum_over_ranks: element-wise sum of a tensor over ranks.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Raises:
        ValueError: as many weights as components are needed.

    Source: GDPO, https://arxiv.org/abs/2601.05242.
    """
    if component_rewards_BK is None:
        component_rewards_BK = token_level_rewards_BT.sum(dim=-1, keepdim=True)
    component_rewards_BK = component_rewards_BK.to(token_level_rewards_BT.dtype)
    num_components = component_rewards_BK.shape[1]
    weights = [1.0] * num_components if weights is None else list(weights)
    if len(weights) != num_components:
        raise ValueError(f"weights={weights}: give one for each of the {num_components} reward components")
    total_B = component_rewards_BK.new_zeros(len(component_rewards_BK))
    for weight, rewards_B in zip(weights, component_rewards_BK.unbind(dim=1), strict=True):
        groups = group_statistics(rewards_B, groups_B, valid_B)
        total_B = total_B + weight * (rewards_B - groups.mean_B) / (groups.std_B + eps)
    total_BT = on_every_token(total_B, response_mask_BT, valid_B)
    advantages_BT = whiten(total_BT, learned_tokens(response_mask_BT, valid_B), sum_over_ranks)
    return advantages_BT, advantages_BT
