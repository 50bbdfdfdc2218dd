"""Entropy collapses through a few tokens whose log-probability and advantage vary together: hold those back.

The tokens are chosen once for the whole mini-batch of all ranks, before the update, by a function of its own; the
losses are told which. So neither depends on the split into micro-batches and ranks. Implementations that choose within
a micro-batch, from the current log-probs, do.

Source: https://arxiv.org/abs/2505.22617, section 4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages import one_rank
from rl_plugins.algorithms.policy_losses.inputs import bounded_log_ratio, check_not_negative, check_share, zero_masked
from rl_plugins.algorithms.policy_losses.order_statistics import Gather, largest, own_values, stable_hash
from rl_plugins.algorithms.policy_losses.ppo import ppo_clip


def clip_cov(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    selected_BT: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate without dual clip; selected tokens give 0, and so no gradient.

    `max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))`, log-ratios bounded as in `ppo_clip`.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy that the ratio is taken against.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        selected_BT: bool, from `select_within_band`.
        clip_low: width of the clip range below 1.
        clip_high: width above 1.

    Returns:
        Loss [B, T] and metrics `clip_fraction`, `selected_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: a negative width.

    Source: https://arxiv.org/abs/2505.22617, Clip-Cov, eq. 12.
    """
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    loss_BT, metrics = ppo_clip(
        log_probs_BT=log_probs_BT,
        old_log_probs_BT=old_log_probs_BT,
        advantages_BT=advantages_BT,
        response_mask_BT=response_mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=None,
    )
    metrics["selected_fraction"] = (selected_BT & response_mask_BT.bool()).float()
    return torch.where(selected_BT, 0, loss_BT), metrics


def kl_cov(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    selected_BT: Tensor,
    coefficient: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The unclipped surrogate `-A ratio`; selected tokens also pay `coefficient |log_probs - old_log_probs|`.

    Log-ratios are bounded in the ratio as in `ppo_clip`, and not in the penalty: it pulls back however far a token
    went. At `log_probs = old_log_probs` the penalty has no gradient.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy that the ratio is taken against.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        selected_BT: bool, from `select_largest`.
        coefficient: weight of the penalty.

    Returns:
        Loss [B, T] and metrics `selected_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: a negative coefficient.

    Source: https://arxiv.org/abs/2505.22617, KL-Cov, eq. 14 (with a coefficient of 1).
    """
    check_not_negative(coefficient=coefficient)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    log_ratio_BT = bounded_log_ratio(log_probs_BT, old_log_probs_BT)
    penalty_BT = coefficient * (log_probs_BT - old_log_probs_BT).abs()
    loss_BT = -advantages_BT * log_ratio_BT.exp() + torch.where(selected_BT, penalty_BT, 0)
    metrics = {
        "selected_fraction": (selected_BT & response_mask_BT.bool()).float(),
        "ppo_kl": -log_ratio_BT.detach(),
    }
    return loss_BT, metrics


def covariances(
    *,
    log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> Tensor:
    """`(A - mean A) (log_probs - mean log_probs)` of each token, means over the valid tokens of all ranks.

    Args:
        log_probs_BT: of the policy before the update.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens that the policy sampled; others may hold anything.
        sum_over_ranks: element-wise sum of a tensor over ranks.

    Returns:
        Float64 [B, T]; 0 at masked positions. Collective.

    Source: https://arxiv.org/abs/2505.22617, eq. 10.
    """
    log_probs_BT, advantages_BT = zero_masked(response_mask_BT, log_probs_BT.detach().double(), advantages_BT.double())
    counts = response_mask_BT.bool().sum().double()
    log_prob_sum, advantage_sum, count = sum_over_ranks(torch.stack([log_probs_BT.sum(), advantages_BT.sum(), counts]))
    count = count.clamp(min=1)
    products_BT = (advantages_BT - advantage_sum / count) * (log_probs_BT - log_prob_sum / count)
    return torch.where(response_mask_BT.bool(), products_BT, 0)


def select_within_band(
    *,
    log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    ids_B: Tensor,
    seed: int,
    share: float = 0.0002,
    low: float = 1.0,
    high: float = 5.0,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
    gather_over_ranks: Gather = own_values,
) -> Tensor:
    """For `clip_cov`: a uniform choice of `max(1, floor(share N))` tokens with `low < covariance < high`.

    N is the number of valid tokens of all ranks; with fewer candidates, all are chosen. The choice is a function of
    `seed`, `ids_B` and the position in the response, whatever the order of samples and their rank.

    Args:
        log_probs_BT: of the policy before the update, where no token is clipped yet.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens that the policy sampled; others may hold anything.
        ids_B: int64 that names each sample in the mini-batch of all ranks.
        seed: another one for each update, or the same tokens would be chosen whenever they are candidates.
        share: of all valid tokens.
        low: lower bound of the band.
        high: upper bound of the band.
        sum_over_ranks: element-wise sum of a tensor over ranks.
        gather_over_ranks: from a vector to those of all ranks in one.

    Returns:
        Bool [B, T]. Collective.

    Raises:
        ValueError: `share` is not in (0, 1], or the band is empty.

    Source: https://arxiv.org/abs/2505.22617, eq. 11.
    """
    check_share(share)
    if not low < high:
        raise ValueError(f"low={low}, high={high}: low must be below high, the band of covariances to choose from")
    valid_BT = response_mask_BT.bool()
    covariances_BT = covariances(
        log_probs_BT=log_probs_BT,
        advantages_BT=advantages_BT,
        response_mask_BT=response_mask_BT,
        sum_over_ranks=sum_over_ranks,
    )
    candidates_BT = valid_BT & (covariances_BT > low) & (covariances_BT < high)
    wanted = _number_to_select(valid_BT, share, sum_over_ranks)
    return _choose(candidates_BT, stable_hash(ids_B, valid_BT.shape[1], seed), wanted, gather_over_ranks)


def select_largest(
    *,
    log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    ids_B: Tensor,
    seed: int,
    share: float = 0.0002,
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
    gather_over_ranks: Gather = own_values,
) -> Tensor:
    """For `kl_cov`: the `max(1, floor(share N))` tokens with the largest covariance, N valid tokens of all ranks.

    Tokens that the policy was certain of tie at the top when their samples have the same advantage; among equals
    the choice is uniform, a function of `seed`, `ids_B` and the position in the response.

    Args:
        log_probs_BT: of the policy before the update.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens that the policy sampled; others may hold anything.
        ids_B: int64 that names each sample in the mini-batch of all ranks.
        seed: of the choice among equals.
        share: of all valid tokens.
        sum_over_ranks: element-wise sum of a tensor over ranks.
        gather_over_ranks: from a vector to those of all ranks in one.

    Returns:
        Bool [B, T]. Collective.

    Raises:
        ValueError: `share` is not in (0, 1].

    Source: https://arxiv.org/abs/2505.22617, eq. 13.
    """
    check_share(share)
    valid_BT = response_mask_BT.bool()
    covariances_BT = covariances(
        log_probs_BT=log_probs_BT,
        advantages_BT=advantages_BT,
        response_mask_BT=response_mask_BT,
        sum_over_ranks=sum_over_ranks,
    )
    wanted = _number_to_select(valid_BT, share, sum_over_ranks)
    top_N = largest(covariances_BT[valid_BT], wanted, gather_over_ranks)
    # Where no rank has a token, everyone leaves here: nobody waits for a second gather.
    if len(top_N) == 0:
        return torch.zeros_like(valid_BT)
    above_BT = valid_BT & (covariances_BT > top_N[-1])
    equal_BT = valid_BT & (covariances_BT == top_N[-1])
    missing = wanted - int((top_N > top_N[-1]).sum().item())
    return above_BT | _choose(equal_BT, stable_hash(ids_B, valid_BT.shape[1], seed), missing, gather_over_ranks)


def _number_to_select(valid_BT: Tensor, share: float, sum_over_ranks: Callable[[Tensor], Tensor]) -> int:
    return max(1, int(share * sum_over_ranks(valid_BT.sum()).item()))


def _choose(candidates_BT: Tensor, hash_BT: Tensor, count: int, gather_over_ranks: Gather) -> Tensor:
    """The `count` candidates of all ranks with the largest hash. Collective."""
    top_N = largest(hash_BT[candidates_BT], count, gather_over_ranks)
    return candidates_BT & (hash_BT >= top_N[-1]) if len(top_N) else torch.zeros_like(candidates_BT)
