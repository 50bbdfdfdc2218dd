"""Losses that hold back the few tokens whose log-probability and advantage vary together, to keep the entropy.

The tokens are selected once for the whole mini-batch of all ranks, before the update, and passed to the loss as
`selected_BT`. So neither selection nor loss depends on the split into micro-batches and ranks. Implementations that
select within a micro-batch, from the current log-probabilities, depend on the split.

Source: https://arxiv.org/abs/2505.22617, section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.masked import largest, zero_masked
from rl_plugins.algorithms.policy_losses.clipped import bounded_log_ratio, ppo_clip
from rl_plugins.config.settings import ABOVE_0_TO_1, NOT_NEGATIVE, check_ranges


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
    """PPO's clipped surrogate without dual clip; selected tokens give loss 0, and so no gradient.

    `max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))`, log-ratios bounded as in `ppo_clip`.

    Args:
        selected_BT: bool, from `select_within_band`.
        clip_low: width of the clip range below 1.
        clip_high: width of the clip range above 1.

    Returns:
        Loss [B, T] and metrics `clip_fraction`, `selected_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: a width is negative.

    Source: https://arxiv.org/abs/2505.22617, Clip-Cov, eq. 12.
    """
    check_ranges(float, NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
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
    coefficient: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Unclipped surrogate `-A ratio`; selected tokens also pay `coefficient |log_probs - old_log_probs|`.

    The log-ratio is bounded in the ratio as in `ppo_clip`, but not in the penalty, which must pull a token back from
    any distance. At `log_probs = old_log_probs` the penalty has no gradient.

    Args:
        selected_BT: bool, from `select_largest`.
        coefficient: weight of the penalty.

    Returns:
        Loss [B, T] and metrics `selected_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: `coefficient` is negative.

    Source: https://arxiv.org/abs/2505.22617, KL-Cov, eq. 14.
    """
    check_ranges(float, NOT_NEGATIVE, coefficient=coefficient)
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
    sum_over_ranks: Collective = one_rank,
) -> Tensor:
    """Compute `(A - mean A) (log_probs - mean log_probs)` of each token, means over the valid tokens of all ranks.

    Args:
        log_probs_BT: log-probability of each token under the policy before the update.

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
    sum_over_ranks: Collective = one_rank,
    gather_over_ranks: Collective = one_rank,
) -> Tensor:
    """Select `max(1, floor(share N))` random tokens with `low < covariance < high`, for `clip_cov`.

    N is the number of valid tokens of all ranks. If fewer tokens are in the band, all of them are selected. The
    selection is uniform and a function of `seed`, `ids_B` and the position in the response: the order of samples and
    the rank of a sample do not matter.

    Args:
        log_probs_BT: log-probability of each token under the policy before the update, when no token is clipped yet.
        seed: seed of the selection; with the same seed in every update, the same tokens would be selected again.
        share: selected share of all valid tokens, above 0 and at most 1.
        low: lower bound of the band.
        high: upper bound of the band.

    Returns:
        Bool [B, T]. Collective.

    Raises:
        ValueError: `share` is not in (0, 1], or the band is empty.

    Source: https://arxiv.org/abs/2505.22617, eq. 11.
    """
    check_ranges(float, ABOVE_0_TO_1, share=share)
    if not low < high:
        raise ValueError(f"low={low}, high={high}: low must be below high, the band of covariances to select from")
    valid_BT = response_mask_BT.bool()
    covariances_BT = covariances(
        log_probs_BT=log_probs_BT,
        advantages_BT=advantages_BT,
        response_mask_BT=response_mask_BT,
        sum_over_ranks=sum_over_ranks,
    )
    candidates_BT = valid_BT & (covariances_BT > low) & (covariances_BT < high)
    wanted = _number_to_select(valid_BT, share, sum_over_ranks)
    return _select_by_hash(candidates_BT, stable_hash(ids_B, valid_BT.shape[1], seed), wanted, gather_over_ranks)


def select_largest(
    *,
    log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    ids_B: Tensor,
    seed: int,
    share: float = 0.0002,
    sum_over_ranks: Collective = one_rank,
    gather_over_ranks: Collective = one_rank,
) -> Tensor:
    """Select the `max(1, floor(share N))` tokens with the largest covariance, for `kl_cov`.

    N is the number of valid tokens of all ranks. Tokens of which the policy was certain have equal covariances if their
    samples have the same advantage. Among equal covariances the selection is uniform, a function of `seed`, `ids_B` and
    the position in the response.

    Args:
        log_probs_BT: log-probability of each token under the policy before the update.
        seed: seed of the selection among equal covariances.
        share: selected share of all valid tokens, above 0 and at most 1.

    Returns:
        Bool [B, T]. Collective.

    Raises:
        ValueError: `share` is not in (0, 1].

    Source: https://arxiv.org/abs/2505.22617, eq. 13.
    """
    check_ranges(float, ABOVE_0_TO_1, share=share)
    valid_BT = response_mask_BT.bool()
    covariances_BT = covariances(
        log_probs_BT=log_probs_BT,
        advantages_BT=advantages_BT,
        response_mask_BT=response_mask_BT,
        sum_over_ranks=sum_over_ranks,
    )
    wanted = _number_to_select(valid_BT, share, sum_over_ranks)
    top_N = largest(covariances_BT[valid_BT], wanted, gather_over_ranks)
    # If no rank has a token, all ranks return here, so no rank waits in a second gather.
    if len(top_N) == 0:
        return torch.zeros_like(valid_BT)
    above_BT = valid_BT & (covariances_BT > top_N[-1])
    equal_BT = valid_BT & (covariances_BT == top_N[-1])
    missing = wanted - int((top_N > top_N[-1]).sum().item())
    return above_BT | _select_by_hash(equal_BT, stable_hash(ids_B, valid_BT.shape[1], seed), missing, gather_over_ranks)


def _number_to_select(valid_BT: Tensor, share: float, sum_over_ranks: Collective) -> int:
    return max(1, int(share * sum_over_ranks(valid_BT.sum()).item()))


def _select_by_hash(candidates_BT: Tensor, hash_BT: Tensor, count: int, gather_over_ranks: Collective) -> Tensor:
    """Select the `count` candidates of all ranks with the largest hash. Collective."""
    top_N = largest(hash_BT[candidates_BT], count, gather_over_ranks)
    return candidates_BT & (hash_BT >= top_N[-1]) if len(top_N) else torch.zeros_like(candidates_BT)


def stable_hash(ids_B: Tensor, length: int, seed: int) -> Tensor:
    """Compute a pseudo-random int64 for each position of each sample from seed, id and position only, [B, length].

    A selection by the hash depends neither on the row of a sample nor on the rest of the batch.

    Source: splitmix64's finalizer, https://doi.org/10.1145/2660193.2660195.
    """
    seed_hash = _mix(torch.tensor(_signed(seed), dtype=torch.int64, device=ids_B.device))
    sample_hash_B = _mix(ids_B.long() ^ seed_hash)
    positions_T = torch.arange(1, length + 1, device=ids_B.device) * _GOLDEN
    return _mix(sample_hash_B[:, None] + positions_T)


def _signed(value: int) -> int:
    """Convert to the int64 with the same lowest 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _mix(bits: Tensor) -> Tensor:
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's shift copies the sign bit."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)
