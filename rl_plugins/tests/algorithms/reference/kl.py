"""KL estimators, KL in the reward, the adaptive coefficient."""

from __future__ import annotations

import math

import numpy as np

from rl_plugins.tests.algorithms.reference.masked import Floats, Mask, clamp, positions


def kl(
    *,
    name: str,
    log_probs_BT: Floats,
    ref_log_probs_BT: Floats,
    response_mask_BT: Mask,
    frozen_log_probs_BT: Floats | None = None,
) -> Floats:
    """KL estimate per token, 0 where masked; a name with + at its end has the base's value and k2's gradient.

    `frozen_log_probs_BT` is used where the gradient is stopped (`log_probs_BT` when None), as in the policy losses.
    """
    frozen_BT = log_probs_BT if frozen_log_probs_BT is None else frozen_log_probs_BT
    kl_BT = np.zeros(response_mask_BT.shape)
    for i, t in positions(response_mask_BT):
        moving = float(log_probs_BT[i, t] - ref_log_probs_BT[i, t])
        held = float(frozen_BT[i, t] - ref_log_probs_BT[i, t])
        if name.endswith("+"):
            kl_BT[i, t] = estimate("k2", moving) - estimate("k2", held) + estimate(name[:-1], held)
        else:
            kl_BT[i, t] = estimate(name, moving)
    return kl_BT


def estimate(name: str, difference: float) -> float:
    """KL estimate of one token, from the difference of log-probs, current minus reference."""
    if name in ("k1", "kl"):
        return difference
    if name == "abs":
        return abs(difference)
    if name in ("k2", "mse"):
        return difference**2 / 2
    if name in ("k3", "low_var_kl"):
        u = clamp(-difference, -20.0, 20.0)
        return clamp(math.exp(u) - u - 1, -10.0, 10.0)
    raise ValueError(name)


def kl_in_reward(
    *,
    token_level_scores_BT: Floats,
    log_probs_BT: Floats,
    ref_log_probs_BT: Floats,
    response_mask_BT: Mask,
    coefficient: float,
    name: str = "k1",
) -> Floats:
    penalty_BT = kl(
        name=name, log_probs_BT=log_probs_BT, ref_log_probs_BT=ref_log_probs_BT, response_mask_BT=response_mask_BT
    )
    return token_level_scores_BT - coefficient * penalty_BT
