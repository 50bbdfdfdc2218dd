"""Divergence PPO: drops the tokens whose probability moved too far, instead of those whose ratio did.

A rare token's ratio is large when nothing happened, and a frequent token's small when much did. So the trust region
is measured by a divergence between the two-outcome distributions (this token or any other) of both policies. A token
outside is dropped only if its update would lead further away.

Source: https://arxiv.org/abs/2602.04879.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.policy_losses.inputs import (
    bounded_log_ratio,
    check_not_negative,
    check_positive,
    zero_masked,
)

EPS = 1e-8
"""Keeps the logarithm finite where a policy is certain."""


def dppo_tv(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence is the change of probability `d = p - p_old`, whose size is the total variation.

    `-A sg(min(ratio, cap)) log_probs` where kept, else 0; kept where `A > 0` if `d <= high`, elsewhere if `d >= -low`.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy that the ratio is taken against.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        low: how far a probability may fall.
        high: how far it may rise.
        cap: bound on the importance weight.

    Returns:
        Loss [B, T] and metrics `clip_fraction` (dropped), `cap_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: `low` or `high` below 0, or `cap` not above 0.

    Source: https://arxiv.org/abs/2602.04879, binary TV.
    """
    _check(low, high, cap)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    rise_BT = log_probs_BT.detach().exp() - old_log_probs_BT.exp()
    kept_BT = torch.where(advantages_BT > 0, rise_BT <= high, rise_BT >= -low)
    return _weighted(log_probs_BT, old_log_probs_BT, advantages_BT, kept_BT, cap)


def dppo_kl(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The divergence is `k = KL(old || current)` of the two-outcome distributions.

    `k = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`. The loss is `dppo_tv`'s; kept where `A > 0` if
    `k <= high` or `p <= p_old`, elsewhere if `k <= low` or `p >= p_old`.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy that the ratio is taken against.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        low: largest divergence of a token that is made less likely.
        high: largest divergence of a token that is made more likely.
        cap: bound on the importance weight.

    Returns:
        Loss [B, T] and metrics `clip_fraction` (dropped), `cap_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: `low` or `high` below 0, or `cap` not above 0.

    Source: https://arxiv.org/abs/2602.04879, binary KL.
    """
    _check(low, high, cap)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    now_BT, before_BT = log_probs_BT.detach().exp(), old_log_probs_BT.exp()
    # Rounding can lift a certain token's probability above 1.
    rest_now_BT, rest_before_BT = (1 - now_BT).clamp(min=0), (1 - before_BT).clamp(min=0)
    other_BT = ((rest_before_BT + EPS) / (rest_now_BT + EPS)).log()
    divergence_BT = before_BT * (old_log_probs_BT - log_probs_BT.detach()) + rest_before_BT * other_BT
    kept_BT = torch.where(
        advantages_BT > 0,
        (divergence_BT <= high) | (now_BT <= before_BT),
        (divergence_BT <= low) | (now_BT >= before_BT),
    )
    return _weighted(log_probs_BT, old_log_probs_BT, advantages_BT, kept_BT, cap)


def _check(low: float, high: float, cap: float) -> None:
    check_not_negative(low=low, high=high)
    check_positive(cap=cap)


def _weighted(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, kept_BT: Tensor, cap: float
) -> tuple[Tensor, dict[str, Tensor]]:
    log_ratio_BT = bounded_log_ratio(log_probs_BT.detach(), old_log_probs_BT)
    ratio_BT = log_ratio_BT.exp()
    loss_BT = torch.where(kept_BT, -advantages_BT * ratio_BT.clamp(max=cap) * log_probs_BT, 0)
    metrics = {
        "clip_fraction": (~kept_BT).float(),
        "cap_fraction": (ratio_BT > cap).float(),
        "ppo_kl": -log_ratio_BT,
    }
    return loss_BT, metrics
