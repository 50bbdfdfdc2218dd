"""Losses of reward models, one pair or token at a time, in the form of textbooks."""

from __future__ import annotations

import math

import numpy as np

from rl_plugins.tests.algorithms.reference.masked import Floats, Mask, positions


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def bradley_terry(
    *, chosen_scores_B: Floats, rejected_scores_B: Floats, margins_B: Floats | None = None, centering: float = 0.0
) -> Floats:
    loss_B = np.zeros(len(chosen_scores_B))
    for i in range(len(loss_B)):
        better, worse = float(chosen_scores_B[i]), float(rejected_scores_B[i])
        margin = 0.0 if margins_B is None else float(margins_B[i])
        loss_B[i] = -log_sigmoid(better - worse - margin) + centering * (better + worse) ** 2
    return loss_B


def process_reward(*, scores_BT: Floats, labels_BT: Floats, label_mask_BT: Mask) -> Floats:
    loss_BT = np.zeros(label_mask_BT.shape)
    for i, t in positions(label_mask_BT):
        score, label = float(scores_BT[i, t]), float(labels_BT[i, t])
        loss_BT[i, t] = -label * log_sigmoid(score) - (1 - label) * log_sigmoid(-score)
    return loss_BT
