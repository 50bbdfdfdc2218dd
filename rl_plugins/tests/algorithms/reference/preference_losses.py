"""The losses of preference optimization, one pair or response at a time, by the papers' formulas."""

from __future__ import annotations

import math

import numpy as np

from rl_plugins.tests.algorithms.reference.masked import Floats
from rl_plugins.tests.algorithms.reference.reward_model_losses import log_sigmoid


def log_ratios(given: dict[str, Floats], i: int, length_normalized: bool) -> tuple[float, float]:
    ratios = []
    for which in ("chosen", "rejected"):
        policy, reference = given[f"{which}_log_probs_N"][i], given[f"ref_{which}_log_probs_N"][i]
        length = given[f"{which}_lengths_N"][i] if length_normalized else 1
        ratios.append(float(policy - reference) / float(length))
    return ratios[0], ratios[1]


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0, length_normalized: bool = False, **given: Floats) -> Floats:
    loss_N = np.zeros(len(given["chosen_log_probs_N"]))
    for i in range(len(loss_N)):
        chosen, rejected = log_ratios(given, i, length_normalized)
        z = beta * (chosen - rejected)
        loss_N[i] = -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)
    return loss_N


def ipo(*, beta: float = 0.1, length_normalized: bool = False, **given: Floats) -> Floats:
    loss_N = np.zeros(len(given["chosen_log_probs_N"]))
    for i in range(len(loss_N)):
        chosen, rejected = log_ratios(given, i, length_normalized)
        loss_N[i] = ((chosen - rejected) - 1 / (2 * beta)) ** 2
    return loss_N


def rpo(*, nll_weight: float = 1.0, **given: object) -> Floats:
    loss_N = dpo(**given)  # type: ignore[arg-type]
    log_probs, lengths = given["chosen_log_probs_N"], given["chosen_lengths_N"]
    return loss_N - nll_weight * np.asarray(log_probs) / np.asarray(lengths)


def orpo(*, odds_weight: float = 0.1, **given: Floats) -> Floats:
    loss_N = np.zeros(len(given["chosen_log_probs_N"]))
    for i in range(len(loss_N)):
        log_odds, means = [], []
        for which in ("chosen", "rejected"):
            mean = float(given[f"{which}_log_probs_N"][i]) / float(given[f"{which}_lengths_N"][i])
            means.append(mean)
            log_odds.append(mean - math.log(1 - math.exp(mean)))
        loss_N[i] = -means[0] - odds_weight * log_sigmoid(log_odds[0] - log_odds[1])
    return loss_N


def simpo(*, beta: float = 2.0, gamma: float = 1.0, **given: Floats) -> Floats:
    loss_N = np.zeros(len(given["chosen_log_probs_N"]))
    for i in range(len(loss_N)):
        chosen = beta / float(given["chosen_lengths_N"][i]) * float(given["chosen_log_probs_N"][i])
        rejected = beta / float(given["rejected_lengths_N"][i]) * float(given["rejected_log_probs_N"][i])
        loss_N[i] = -log_sigmoid(chosen - rejected - gamma)
    return loss_N


def kto(
    *,
    log_probs_N: Floats,
    ref_log_probs_N: Floats,
    desirable_N: Floats,
    reference_point: float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Floats:
    """The paper's `lambda_y - v(x, y)`."""
    loss_N = np.zeros(len(log_probs_N))
    for i in range(len(loss_N)):
        reward = float(log_probs_N[i] - ref_log_probs_N[i])
        if desirable_N[i]:
            value = desirable_weight * math.exp(log_sigmoid(beta * (reward - float(reference_point))))
            loss_N[i] = desirable_weight - value
        else:
            value = undesirable_weight * math.exp(log_sigmoid(beta * (float(reference_point) - reward)))
            loss_N[i] = undesirable_weight - value
    return loss_N


def kto_reference_point(policy: list[Floats], reference: list[Floats]) -> float:
    """Reference point from the log-probs of all ranks."""
    ratios = [
        float(a - b)
        for pair, ref_pair in zip(policy, reference, strict=True)
        for a, b in zip(pair, ref_pair, strict=True)
    ]
    return max(0.0, sum(ratios) / len(ratios)) if ratios else 0.0
