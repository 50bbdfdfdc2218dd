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
    log_prob_min_clamp: float | None = None,
    loss_max_clamp: float | None = None,
) -> Floats:
    lowest = -math.inf if log_prob_min_clamp is None else log_prob_min_clamp
    largest = math.inf if loss_max_clamp is None else loss_max_clamp
    losses_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        total = 0.0
        for of_teacher, of_student in zip(teacher_top_log_probs_BTK[i, t], top_log_probs_BTK[i, t], strict=True):
            log_p, log_q = max(float(of_teacher), lowest), max(float(of_student), lowest)
            total += math.exp(log_p) * (log_p - log_q)
        losses_BT[i, t] = min(max(total, 0.0), largest)
    return losses_BT
