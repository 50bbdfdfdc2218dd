"""The formulas a second time: float64 NumPy, plain loops, nothing shared with the code under test."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def grpo(rewards_BT: Array, mask_BT: Array, groups: Array, valid: Array, scale: str, eps: float = 1e-6) -> Array:
    samples = len(rewards_BT)
    totals = [float(sum(rewards_BT[i])) if valid[i] else math.nan for i in range(samples)]
    valid_totals = [totals[i] for i in range(samples) if valid[i]]
    advantages = np.zeros(mask_BT.shape)
    for i in range(samples):
        if not valid[i]:
            continue
        members = [totals[j] for j in range(samples) if groups[j] == groups[i] and valid[j]]
        alone = len(members) == 1
        advantage = totals[i] - (0.0 if alone else sum(members) / len(members))
        if scale == "group":
            advantage /= (1.0 if alone else unbiased_std(members)) + eps
        elif scale == "batch":
            advantage /= (1.0 if len(valid_totals) == 1 else unbiased_std(valid_totals)) + eps
        for t in range(mask_BT.shape[1]):
            advantages[i, t] = advantage if mask_BT[i, t] else 0.0
    return advantages


def unbiased_std(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def ppo_clip(
    log_probs: Array, old: Array, advantages: Array, mask: Array, low: float, high: float, dual: float | None
) -> dict[str, Array]:
    """Loss, its derivative by the log-prob, and the metrics; 0 where masked."""
    names = ("loss", "gradient", "clip_fraction", "dual_clip_fraction", "ppo_kl")
    out = {name: np.zeros(mask.shape) for name in names}
    for i, t in np.argwhere(mask > 0):
        advantage = advantages[i, t]
        difference = log_probs[i, t] - old[i, t]
        log_ratio = min(max(difference, -20.0), 20.0)
        ratio = math.exp(log_ratio)
        plain = -advantage * ratio
        clipped = -advantage * min(max(ratio, 1 - low), 1 + high)
        loss = max(plain, clipped)
        # A clipped ratio is a constant, and so is a bounded log-ratio or a bounded loss.
        moves = abs(difference) < 20 and (plain >= clipped)
        gradient = plain if moves else 0.0
        if dual is not None and advantage < 0 and loss > -dual * advantage:
            loss, gradient = -dual * advantage, 0.0
            out["dual_clip_fraction"][i, t] = 1
        out["loss"][i, t], out["gradient"][i, t] = loss, gradient
        out["clip_fraction"][i, t] = clipped > plain
        out["ppo_kl"][i, t] = -log_ratio
    return out


def kl(name: str, log_prob: float, reference: float) -> float:
    difference = log_prob - reference
    if name == "k1":
        return difference
    if name == "k2":
        return difference * difference / 2
    u = min(max(-difference, -20.0), 20.0)
    return min(max(math.exp(u) - u - 1, -10.0), 10.0)


def kl_in_reward(scores: Array, log_probs: Array, reference: Array, mask: Array, beta: float) -> Array:
    rewards = scores.copy()
    for i, t in np.argwhere(mask > 0):
        rewards[i, t] -= beta * (log_probs[i, t] - reference[i, t])
    return rewards


def aggregate(values: Array, mask: Array, mode: str, scale_factor: float) -> float:
    """Return the aggregated loss of the whole mini-batch, in one process."""
    total, tokens, sequences = 0.0, 0, 0
    for i in range(len(values)):
        chosen = [values[i, t] for t in range(mask.shape[1]) if mask[i, t]]
        if not chosen:
            continue
        tokens, sequences = tokens + len(chosen), sequences + 1
        total += sum(chosen) / len(chosen) if mode == "seq-mean-token-mean" else sum(chosen)
    if mode == "token-mean":
        return total / max(tokens, 1)
    if mode == "token-sum":
        return total
    if mode == "seq-mean-token-sum-norm":
        return total / max(sequences, 1) / scale_factor
    return total / max(sequences, 1)


def adaptive_kl(coefficient: float, measured: float, target: float, horizon: float, sequences: int) -> float:
    proportion = measured / target - 1
    bounded = 0.2 if proportion > 0.2 else -0.2 if proportion < -0.2 else proportion
    return coefficient * (1 + bounded * sequences / horizon)
