"""Advantages relative to the other samples of the same prompt: one number for all tokens of a sample.

R is the sum of a sample's token-level rewards over all positions, masked positions included: the score of a response
that is empty or ends in an observation is on a masked position. A group with a single valid sample has mean 0 and
standard deviation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.masked import (
    group_leaders,
    group_ranks,
    group_statistics,
    learned_tokens,
    on_every_token,
    standard_deviation,
    whiten,
)
from rl_plugins.config.settings import AT_LEAST_1, FINITE, check_ranges


def grpo(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-6,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage: `(R - mean of the group) / (std + eps)`, the same for every token of a sample.

    R is the sum of the token-level rewards over all positions, masked positions included.

    Args:
        scale: divide by the unbiased standard deviation of the group, of the batch of all ranks, or not at
            all (`none` is Dr.GRPO, https://arxiv.org/abs/2503.20783).
        eps: constant added to the standard deviation.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Raises:
        ValueError: the scale is unknown.

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
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Advantage of the best sample of a group over the second best, to train the best of k samples.

    `(R_best - R_second) / (std + eps)` for the best sample, 0 for all other samples, and 0 for all samples if several
    have the largest R. A group with a single valid sample has no second best and gets 0. (Other implementations raise
    an error; here a failed reward can leave such a group.)

    Args:
        normalize: divide by the unbiased standard deviation of the group.
        eps: constant added to the standard deviation.
        sum_over_ranks: not used, because a group is on one rank.

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
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out: R minus the mean R of the other samples, `n / (n - 1) (R - mean of the group)`.

    The only valid sample of a group keeps its reward, as in every estimator here. (Implementations disagree: some give
    0.)

    Args:
        sum_over_ranks: not used, because a group is on one rank.

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
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """R minus the length-weighted mean of the group, `sum_j L_j R_j / sum_j L_j`: the baseline of least variance.

    L is the number of sampled tokens. (The variance is least if the squared gradient norm of a response is proportional
    to its length.) The only valid sample of a group keeps its reward.

    Args:
        sum_over_ranks: not used, because a group is on one rank.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Source: OPO, https://arxiv.org/abs/2505.23585.
    """
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    groups = group_statistics(rewards_B, groups_B, valid_B)
    # From the mean, so that equal rewards have exactly their value as baseline.
    centred_B = rewards_B - groups.mean_B
    lengths_B = learned_tokens(response_mask_BT, valid_B).sum(dim=-1).to(rewards_B.dtype)
    # The ratio of two means is the ratio of the sums. A group with one valid sample has mean 0, and so baseline 0.
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
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Group policy gradient: `alpha (R - mean of the group) / norm`, `alpha = samples / samples with R != 0`.

    alpha compensates for samples without a signal, over the batch of all ranks (at least one sample is counted). alpha
    counts nonzero rewards, as the common implementation does, and not nonzero advantages: with a KL penalty in the
    reward, alpha is about 1.

    Args:
        norm: constant divisor.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Raises:
        ValueError: `norm` is not positive.

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
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Maximum likelihood RL: `(R - mean of the group) / (mean of the group + eps)`, for rewards of at least 0.

    Maximizes the log of the success rate instead of the success rate: the rarer the successes of a prompt, the larger
    its weight. With rewards 0 and 1 the result is the mean gradient of the successful samples, an unbiased gradient of
    the expansion of the log with as many terms as the group has samples. A group whose mean is not positive (no
    success) gets 0; a group with a single valid sample gets 0, too.

    Args:
        eps: constant added to the mean.
        sum_over_ranks: not used, because a group is on one rank.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Source: MaxRL, https://arxiv.org/abs/2602.02710.
    """
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    mean_B = group_statistics(rewards_B, groups_B, valid_B).mean_B
    advantages_B = torch.where(mean_B > 0, (rewards_B - mean_B) / (mean_B + eps), 0)
    advantages_BT = on_every_token(advantages_B, response_mask_BT, valid_B)
    return advantages_BT, advantages_BT


def best_of_n(
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups_B: Tensor,
    valid_B: Tensor,
    keep: int | None = 1,
    above: float | None = None,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling for fine-tuning on the policy's own samples: kept samples have one advantage, all others 0.

    A sample is kept if it is among the `keep` best of its group and its R is above `above`. Of samples with the same R,
    the first ones are kept. The advantage of the kept samples is `sampled tokens / sampled tokens of the kept samples`,
    over the batch of all ranks. So with the policy loss `reinforce` and the aggregation `token-mean`, the loss of the
    batch is the mean negative log-likelihood of the kept tokens: the loss of supervised fine-tuning.

    Args:
        keep: number of samples to keep in a group, the best first; None for all samples above `above`.
        above: reward that a kept sample exceeds; None for no bound.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Raises:
        ValueError: `keep` is below 1, `above` is not finite, or both are None.

    Source: RAFT, https://arxiv.org/abs/2304.06767, algorithm 1 (the best sample of each prompt); ReST,
    https://arxiv.org/abs/2308.08998 (all samples above a threshold).
    """
    if keep is None and above is None:
        raise ValueError("keep=null and above=null: every sample would be kept, so set at least one of the two")
    kept_B = valid_B
    rewards_B = token_level_rewards_BT.sum(dim=-1)
    if keep is not None:
        check_ranges(int, AT_LEAST_1, keep=keep)
        kept_B = kept_B & (group_ranks(rewards_B, groups_B, valid_B) < keep)
    if above is not None:
        check_ranges(float, FINITE, above=above)
        kept_B = kept_B & (rewards_B > above)
    learned_BT = learned_tokens(response_mask_BT, valid_B)
    counts = torch.stack([learned_BT.sum(), (learned_BT & kept_B[:, None]).sum()]).double()
    sampled, kept = sum_over_ranks(counts)
    advantages_B = kept_B * (sampled / kept.clamp(min=1)).to(rewards_B.dtype)
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
    normalize: bool = True,
    eps: float = 1e-6,
    sum_over_ranks: Collective = one_rank,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage of each reward component: `whiten(sum_k w_k GRPO(R^k))` over the tokens of the batch.

    Different combinations of rewards with the same sum keep different advantages. Without components the result is
    GRPO followed by whitening.

    Args:
        token_level_rewards_BT: reward of each token, used only without components; with components, a KL penalty in
            the reward has no effect.
        weights: weight of each component; None for 1 each.
        normalize: divide each component by its unbiased standard deviation of the group.
        eps: constant added to the standard deviation of the group.

    Returns:
        Advantages and returns, the same tensor, [B, T].

    Raises:
        ValueError: the number of weights differs from the number of components.

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
        advantages_B = rewards_B - groups.mean_B
        total_B = total_B + weight * (advantages_B / (groups.std_B + eps) if normalize else advantages_B)
    total_BT = on_every_token(total_B, response_mask_BT, valid_B)
    advantages_BT = whiten(total_BT, learned_tokens(response_mask_BT, valid_B), sum_over_ranks)
    return advantages_BT, advantages_BT
