"""Correction of the gap between the trained policy and the sampling policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rl_plugins.tests.algorithms.reference.masked import Floats, Mask, clamp, masked_mean, mean, positions, row_values


@dataclass(frozen=True)
class Rejection:
    """`mode` is token_k1..3, seq_sum_k1..3, seq_mean_k1..3 or seq_max_k2..3.

    k2 and k3 take `threshold`; k1 takes `low` and `high`, or `threshold` for the range 1 / threshold to threshold.
    """

    mode: str
    threshold: float | None = None
    low: float | None = None
    high: float | None = None


def importance_weights(
    *,
    log_probs_BT: Floats,
    rollout_log_probs_BT: Floats,
    response_mask_BT: Mask,
    level: str = "token",
    cap: float | None = None,
    band: tuple[float, float] | None = None,
    normalize: bool = False,
) -> Floats:
    if cap is not None and band is not None:
        raise ValueError("cap and band exclude each other")
    differences_BT = gaps(log_probs_BT, rollout_log_probs_BT, response_mask_BT)
    weights_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        exponent = {"token": float(differences_BT[i, t]), "sequence": math.fsum(differences_BT[i])}[level]
        weight = math.exp(clamp(exponent, -20.0, 20.0))
        if cap is not None:
            weight = min(weight, cap)
        if band is not None and not band[0] <= weight <= band[1]:
            weight = 0.0
        weights_BT[i, t] = weight
    if not normalize:
        return weights_BT
    if level == "token":
        average = masked_mean(weights_BT, response_mask_BT)
    else:
        rows = [row_values(weights_BT[i], response_mask_BT[i]) for i in range(len(weights_BT))]
        average = mean([row[0] for row in rows if row])
    return weights_BT / average if average > 1e-8 else weights_BT


def rejection_mask(
    *,
    log_probs_BT: Floats,
    rollout_log_probs_BT: Floats,
    response_mask_BT: Mask,
    rules: list[Rejection] | tuple[Rejection, ...],
) -> Floats:
    """Response mask without the tokens rejected by a rule; every rule is applied to the whole response mask."""
    differences_BT = gaps(log_probs_BT, rollout_log_probs_BT, response_mask_BT)
    mask_BT: Floats = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        mask_BT[i, t] = 1.0
    for rule in rules:
        scope, name = rule.mode.rsplit("_", 1)
        for i in range(len(mask_BT)):
            statistics = [statistic(name, d) for d in row_values(differences_BT[i], response_mask_BT[i])]
            if not statistics:
                continue
            judged = statistics if scope == "token" else [of_sequence(scope, statistics)] * len(statistics)
            places = [t for t in range(mask_BT.shape[1]) if response_mask_BT[i, t]]
            for t, value in zip(places, judged, strict=True):
                if not accepts(rule, name, value):
                    mask_BT[i, t] = 0.0
    return mask_BT


def statistic(name: str, difference: float) -> float:
    d = clamp(difference, -20.0, 20.0)
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[name]


def of_sequence(scope: str, statistics: list[float]) -> float:
    return {"seq_sum": math.fsum(statistics), "seq_mean": mean(statistics), "seq_max": max(statistics)}[scope]


def accepts(rule: Rejection, name: str, value: float) -> bool:
    if name != "k1":
        assert rule.threshold is not None
        return value <= rule.threshold
    if rule.low is not None and rule.high is not None:
        return math.log(rule.low) <= value <= math.log(rule.high)
    assert rule.threshold is not None
    return math.log(1 / rule.threshold) <= value <= math.log(rule.threshold)


def diagnostics(
    *,
    log_probs_BT: Floats,
    rollout_log_probs_BT: Floats,
    response_mask_BT: Mask,
    weights_BT: Floats | None = None,
) -> dict[str, float]:
    """Metrics without clamps; means over samples leave out empty samples; `ess` needs weights."""
    differences_BT = gaps(log_probs_BT, rollout_log_probs_BT, response_mask_BT)
    samples = [i for i in range(len(response_mask_BT)) if any(response_mask_BT[i])]
    if not samples:
        raise ValueError("no valid token")
    new = {i: mean(row_values(log_probs_BT[i], response_mask_BT[i])) for i in samples}
    sampled = {i: mean(row_values(rollout_log_probs_BT[i], response_mask_BT[i])) for i in samples}
    log_ppl = [sampled[i] - new[i] for i in samples]
    tokens = [float(differences_BT[place]) for place in positions(response_mask_BT)]
    result = {
        "training_ppl": mean([math.exp(-new[i]) for i in samples]),
        "rollout_ppl": mean([math.exp(-sampled[i]) for i in samples]),
        "kl": mean([-d for d in tokens]),
        "k3": mean([math.exp(d) - d - 1 for d in tokens]),
        "log_ppl_difference": mean(log_ppl),
        "log_ppl_absolute_difference": mean([abs(value) for value in log_ppl]),
        "log_ppl_difference_max": max(log_ppl),
        "log_ppl_difference_min": min(log_ppl),
        "ppl_ratio": mean([math.exp(value) for value in log_ppl]),
        "chi2_token": mean([math.exp(2 * d) for d in tokens]) - 1,
        "chi2_sequence": mean([math.exp(2 * math.fsum(differences_BT[i])) for i in samples]) - 1,
    }
    if weights_BT is not None:
        average = masked_mean(weights_BT, response_mask_BT)
        result["ess"] = 1 / mean([(float(weights_BT[place]) / average) ** 2 for place in positions(response_mask_BT)])
    return result


def gaps(log_probs_BT: Floats, rollout_log_probs_BT: Floats, response_mask_BT: Mask) -> Floats:
    """Training minus rollout, 0 where masked."""
    differences_BT = np.zeros(response_mask_BT.shape)
    bad = 0
    for i, t in positions(response_mask_BT):
        pair = float(log_probs_BT[i, t]), float(rollout_log_probs_BT[i, t])
        bad += not all(math.isfinite(value) for value in pair)
        differences_BT[i, t] = pair[0] - pair[1]
    if bad:
        raise ValueError(f"{bad} valid positions have log-probs that are not finite")
    return differences_BT
