"""The forward KL to a teacher over its k most likely tokens."""

from __future__ import annotations

import math

import numpy as np

from rl_plugins.tests.algorithms.reference.masked import Floats, Mask, positions


def forward_kl_top_k(
    *,
    teacher_top_log_probs_BTK: Floats,
    top_log_probs_BTK: Floats,
    response_mask_BT: Mask,
    teacher_top_weights_BTK: Floats | None = None,
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
) -> Floats:
    lowest = -math.inf if log_prob_min_clamp is None else log_prob_min_clamp
    largest = math.inf if loss_max_clamp is None else loss_max_clamp
    losses_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        total = 0.0
        for k, of_teacher in enumerate(teacher_top_log_probs_BTK[i, t]):
            log_p, log_q = max(float(of_teacher), lowest), max(float(top_log_probs_BTK[i, t, k]), lowest)
            weight = 1.0 if teacher_top_weights_BTK is None else float(teacher_top_weights_BTK[i, t, k])
            total += weight * math.exp(log_p) * (log_p - log_q)
        losses_BT[i, t] = min(max(total, 0.0), largest)
    return losses_BT
