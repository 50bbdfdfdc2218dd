"""Policy losses per token, 0 where the mask is 0.

Values only. Where a formula stops the gradient, `frozen_log_probs_BT` (`log_probs_BT` when None) is the input: finite
differences in `log_probs_BT` alone, with frozen log-probs held constant, give the intended gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rl_plugins.tests.algorithms.reference.masked import (
    Bools,
    Floats,
    Mask,
    clamp,
    masked_mean,
    mean,
    positions,
    row_values,
)


def ppo_clip(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Floats:
    def token(log_prob: float, old: float, advantage: float) -> float:
        loss = clipped_surrogate(bounded_ratio(log_prob, old), advantage, clip_low, clip_high)
        return min(loss, -dual_clip * advantage) if dual_clip is not None and advantage < 0 else loss

    return per_token(token, log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)


def reinforce(
    *, log_probs_BT: Floats, old_log_probs_BT: Floats, advantages_BT: Floats, response_mask_BT: Mask
) -> Floats:
    return per_token(lambda now, old, a: -a * now, log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)


def gpg(*, log_probs_BT: Floats, old_log_probs_BT: Floats, advantages_BT: Floats, response_mask_BT: Mask) -> Floats:
    return per_token(lambda now, old, a: -a * now, log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)


def cispo(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    frozen_log_probs_BT: Floats | None = None,
) -> Floats:
    frozen_BT = log_probs_BT if frozen_log_probs_BT is None else frozen_log_probs_BT
    loss_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        weight = clamp(bounded_ratio(frozen_BT[i, t], old_log_probs_BT[i, t]), 1 - clip_low, 1 + clip_high)
        loss_BT[i, t] = -weight * advantages_BT[i, t] * log_probs_BT[i, t]
    return loss_BT


def dro(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    beta: float,
) -> Floats:
    def token(log_prob: float, old: float, advantage: float) -> float:
        return -(log_prob * advantage - beta / 2 * (log_prob - old) ** 2)

    return per_token(token, log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)


def sapo(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Floats:
    def token(log_prob: float, old: float, advantage: float) -> float:
        tau = tau_positive if advantage > 0 else tau_negative
        argument = tau * (bounded_ratio(log_prob, old) - 1)
        return -(4 / tau) / (1 + math.exp(-argument)) * advantage

    return per_token(token, log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)


def vespo(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    frozen_log_probs_BT: Floats | None = None,
) -> Floats:
    """The ratio of a response is a product of ratios, bounded to [e^-20, e^20], and so is each weight from above."""
    frozen_BT = log_probs_BT if frozen_log_probs_BT is None else frozen_log_probs_BT
    loss_BT: Floats = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        log_ratios = [clamp(x, -20.0, 20.0) for x in row_differences(frozen_BT, old_log_probs_BT, response_mask_BT, i)]
        ratio = clamp(math.prod(math.exp(x) for x in log_ratios), math.exp(-20.0), math.exp(20.0))
        positive = advantages_BT[i, t] >= 0
        power, rate = (k_positive, lambda_positive) if positive else (k_negative, lambda_negative)
        weight = min(ratio**power * math.exp(rate) * math.exp(-rate * ratio), math.exp(20.0))
        loss_BT[i, t] = -weight * advantages_BT[i, t] * log_probs_BT[i, t]
    return loss_BT


def dppo_tv(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
    frozen_log_probs_BT: Floats | None = None,
) -> Floats:
    def keep(log_prob: float, old: float, advantage: float) -> bool:
        difference = math.exp(log_prob) - math.exp(old)
        return difference <= high if advantage > 0 else difference >= -low

    inputs = (log_probs_BT, frozen_log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    return weighted_where_kept(keep, cap, *inputs)


def dppo_kl(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
    frozen_log_probs_BT: Floats | None = None,
) -> Floats:
    def keep(log_prob: float, old: float, advantage: float) -> bool:
        new_p, old_p = math.exp(log_prob), math.exp(old)
        binary_kl = old_p * (old - log_prob) + (1 - old_p) * math.log((1 - old_p + 1e-8) / (1 - new_p + 1e-8))
        if advantage > 0:
            return binary_kl <= high or new_p <= old_p
        return binary_kl <= low or new_p >= old_p

    inputs = (log_probs_BT, frozen_log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT)
    return weighted_where_kept(keep, cap, *inputs)


def gspo(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    frozen_log_probs_BT: Floats | None = None,
) -> Floats:
    frozen_BT = log_probs_BT if frozen_log_probs_BT is None else frozen_log_probs_BT
    loss_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        sequence = mean(row_differences(frozen_BT, old_log_probs_BT, response_mask_BT, i))
        ratio = math.exp(min(float(log_probs_BT[i, t]) - float(frozen_BT[i, t]) + sequence, 10.0))
        loss_BT[i, t] = clipped_surrogate(ratio, float(advantages_BT[i, t]), clip_low, clip_high)
    return loss_BT


def gmpo(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Floats:
    """Every valid token of a sequence holds the sequence's loss."""
    loss_BT: Floats = np.zeros(response_mask_BT.shape)
    for i in range(len(loss_BT)):
        advantages = row_values(advantages_BT[i], response_mask_BT[i])
        bounded = []
        differences = row_differences(log_probs_BT, old_log_probs_BT, response_mask_BT, i)
        for x, advantage in zip(differences, advantages, strict=True):
            sign = (advantage > 0) - (advantage < 0)
            bounded.append(sign * min(sign * x, sign * clamp(x, -clip_low, clip_high)))
        loss = -mean(advantages) * math.exp(mean(bounded))
        for t in range(loss_BT.shape[1]):
            if response_mask_BT[i, t]:
                loss_BT[i, t] = loss
    return loss_BT


def clip_cov(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    selected_BT: Mask,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Floats:
    loss_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        if not selected_BT[i, t]:
            ratio = math.exp(log_probs_BT[i, t] - old_log_probs_BT[i, t])
            loss_BT[i, t] = clipped_surrogate(ratio, float(advantages_BT[i, t]), clip_low, clip_high)
    return loss_BT


def kl_cov(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    selected_BT: Mask,
    coefficient: float = 1.0,
) -> Floats:
    loss_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        difference = float(log_probs_BT[i, t] - old_log_probs_BT[i, t])
        loss_BT[i, t] = -advantages_BT[i, t] * math.exp(difference)
        if selected_BT[i, t]:
            loss_BT[i, t] += coefficient * abs(difference)
    return loss_BT


def covariances(*, log_probs_BT: Floats, advantages_BT: Floats, response_mask_BT: Mask) -> Floats:
    """(A - mean A)(l - mean l), by the means over all tokens given; 0 where masked."""
    mean_advantage = masked_mean(advantages_BT, response_mask_BT)
    mean_log_prob = masked_mean(log_probs_BT, response_mask_BT)
    covariance_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        covariance_BT[i, t] = (advantages_BT[i, t] - mean_advantage) * (log_probs_BT[i, t] - mean_log_prob)
    return covariance_BT


def off_policy_sequence_mask(
    *,
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
    threshold: float,
) -> Bools:
    """Drop sequences of negative mean advantage whose mean log-prob fell by more than the threshold."""
    keep_B = np.ones(len(response_mask_BT), dtype=bool)
    for i in range(len(keep_B)):
        fall = -mean(row_differences(log_probs_BT, old_log_probs_BT, response_mask_BT, i))
        keep_B[i] = not (mean(row_values(advantages_BT[i], response_mask_BT[i])) < 0 and fall > threshold)
    return keep_B


def top_entropy_mask(*, entropy_BT: Floats, response_mask_BT: Mask, share: float) -> Floats:
    """1 on tokens at or above the (1 - share) quantile of all valid tokens, linearly interpolated."""
    chosen = sorted(float(entropy_BT[place]) for place in positions(response_mask_BT))
    mask_BT = np.zeros(response_mask_BT.shape)
    if not chosen:
        return mask_BT
    threshold = float(np.quantile(chosen, 1 - share))
    for place in positions(response_mask_BT):
        mask_BT[place] = entropy_BT[place] >= threshold
    return mask_BT


def positive_nll(*, log_probs_BT: Floats, is_positive_B: Bools, response_mask_BT: Mask) -> Floats:
    loss_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        if is_positive_B[i]:
            loss_BT[i, t] = -log_probs_BT[i, t]
    return loss_BT


def bounded_ratio(log_prob: float, old: float) -> float:
    return math.exp(clamp(float(log_prob) - float(old), -20.0, 20.0))


def clipped_surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return max(-advantage * ratio, -advantage * clamp(ratio, 1 - low, 1 + high))


def per_token(
    token: Callable[[float, float, float], float],
    log_probs_BT: Floats,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
) -> Floats:
    loss_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        loss_BT[i, t] = token(float(log_probs_BT[i, t]), float(old_log_probs_BT[i, t]), float(advantages_BT[i, t]))
    return loss_BT


def weighted_where_kept(
    keep: Callable[[float, float, float], bool],
    cap: float,
    log_probs_BT: Floats,
    frozen_log_probs_BT: Floats | None,
    old_log_probs_BT: Floats,
    advantages_BT: Floats,
    response_mask_BT: Mask,
) -> Floats:
    frozen_BT = log_probs_BT if frozen_log_probs_BT is None else frozen_log_probs_BT
    loss_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        frozen, old, advantage = float(frozen_BT[i, t]), float(old_log_probs_BT[i, t]), float(advantages_BT[i, t])
        if keep(frozen, old, advantage):
            loss_BT[i, t] = -advantage * min(bounded_ratio(frozen, old), cap) * log_probs_BT[i, t]
    return loss_BT


def row_differences(first_BT: Floats, second_BT: Floats, mask_BT: Mask, i: int) -> list[float]:
    first, second = row_values(first_BT[i], mask_BT[i]), row_values(second_BT[i], mask_BT[i])
    return [a - b for a, b in zip(first, second, strict=True)]
