"""Losses that hold the policy near the old policy: a divergence (DPPO), a smooth gate (SAPO, VESPO), a penalty (DRO).

DPPO drops the tokens whose probability moved too far, where PPO drops the tokens whose ratio did. The ratio of a rare
token is large after a negligible change, and the ratio of a frequent token is small after a large change. So DPPO
measures the trust region by a divergence between the two-outcome distributions (this token or any other token) of both
policies. A token outside the trust region is dropped only if its update would lead further away.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_plugins.algorithms.masked import zero_masked
from rl_plugins.algorithms.policy_losses.clipped import MAX_LOG_RATIO, bounded_log_ratio
from rl_plugins.config.settings import ABOVE_0, NOT_NEGATIVE, check_ranges

EPS = 1e-8
"""Constant that keeps the logarithm finite where a policy is certain."""


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
    """Divergence PPO with the change of probability `d = p - p_old`, whose size is the total variation.

    `-A sg(min(ratio, cap)) log_probs` for kept tokens, else 0. A token with `A > 0` is kept if `d <= high`, any other
    token if `d >= -low`.

    Args:
        low: largest decrease of the probability.
        high: largest increase of the probability.
        cap: upper bound on the importance weight.

    Returns:
        Loss [B, T] and metrics `clip_fraction` (dropped), `cap_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: `low` or `high` is below 0, or `cap` is not above 0.

    Source: https://arxiv.org/abs/2602.04879, binary TV.
    """
    return _dppo(_near_by_tv, log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT, low, high, cap)


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
    """Divergence PPO with `k = KL(old || current)` of the two-outcome distributions.

    `k = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`. The loss of a kept token is the loss of
    `dppo_tv`. A token with `A > 0` is kept if `k <= high` or `p <= p_old`, any other token if `k <= low` or
    `p >= p_old`.

    Args:
        low: largest divergence of a token whose probability falls.
        high: largest divergence of a token whose probability rises.
        cap: upper bound on the importance weight.

    Returns:
        Loss [B, T] and metrics `clip_fraction` (dropped), `cap_fraction`, `ppo_kl` [B, T].

    Raises:
        ValueError: `low` or `high` is below 0, or `cap` is not above 0.

    Source: https://arxiv.org/abs/2602.04879, binary KL.
    """
    return _dppo(_near_by_kl, log_probs_BT, old_log_probs_BT, advantages_BT, response_mask_BT, low, high, cap)


def _near_by_tv(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, low: float, high: float
) -> Tensor:
    rise_BT = log_probs_BT.exp() - old_log_probs_BT.exp()
    return torch.where(advantages_BT > 0, rise_BT <= high, rise_BT >= -low)


def _near_by_kl(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, low: float, high: float
) -> Tensor:
    probs_BT, old_probs_BT = log_probs_BT.exp(), old_log_probs_BT.exp()
    # Rounding can raise the probability of a certain token above 1.
    rest_BT, old_rest_BT = (1 - probs_BT).clamp(min=0), (1 - old_probs_BT).clamp(min=0)
    rest_log_ratio_BT = ((old_rest_BT + EPS) / (rest_BT + EPS)).log()
    divergence_BT = old_probs_BT * (old_log_probs_BT - log_probs_BT) + old_rest_BT * rest_log_ratio_BT
    return torch.where(
        advantages_BT > 0,
        (divergence_BT <= high) | (probs_BT <= old_probs_BT),
        (divergence_BT <= low) | (probs_BT >= old_probs_BT),
    )


def _dppo(
    is_near: Callable[[Tensor, Tensor, Tensor, float, float], Tensor],
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    low: float,
    high: float,
    cap: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the capped loss of the tokens that `is_near` keeps, and its metrics."""
    check_ranges(float, NOT_NEGATIVE, low=low, high=high)
    check_ranges(float, ABOVE_0, cap=cap)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    kept_BT = is_near(log_probs_BT.detach(), old_log_probs_BT, advantages_BT, low, high)
    log_ratio_BT = bounded_log_ratio(log_probs_BT.detach(), old_log_probs_BT)
    ratio_BT = log_ratio_BT.exp()
    loss_BT = torch.where(kept_BT, -advantages_BT * ratio_BT.clamp(max=cap) * log_probs_BT, 0)
    metrics = {
        "clip_fraction": (~kept_BT).float(),
        "cap_fraction": (ratio_BT > cap).float(),
        "ppo_kl": -log_ratio_BT,
    }
    return loss_BT, metrics


def sapo(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft adaptive policy optimization: the ratio passes a sigmoid whose slope at ratio 1 is 1.

    `-A (4 / tau) sigmoid(tau (ratio - 1))` with `tau = tau_positive` where `A > 0`, else `tau_negative`.
    The paper takes the mean over a sequence's tokens, then over sequences (`seq-mean-token-mean`); any aggregation
    works.

    Args:
        tau_positive: temperature of tokens with positive advantage; larger values reduce the gradient faster as the
            ratio moves away from 1.
        tau_negative: temperature of all other tokens.

    Returns:
        Loss [B, T] and metric `ppo_kl` [B, T].

    Raises:
        ValueError: a temperature is not above 0.

    Source: https://arxiv.org/abs/2511.20347.
    """
    check_ranges(float, ABOVE_0, tau_positive=tau_positive, tau_negative=tau_negative)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    log_ratio_BT = bounded_log_ratio(log_probs_BT, old_log_probs_BT)
    tau_BT = torch.full_like(advantages_BT, tau_negative).masked_fill(advantages_BT > 0, tau_positive)
    gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (log_ratio_BT.exp() - 1))
    return -gate_BT * advantages_BT, {"ppo_kl": -log_ratio_BT.detach()}


def vespo(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Variational sequence-level soft policy optimization: a smooth weight of the ratio of the whole response.

    `-sg(phi(W)) A log_probs` with `phi(W) = W^k e^(lambda (1 - W))`. W is the product of the ratios of the response's
    tokens, without a mean over the length, and `sg` is the stop-gradient. phi is 1 at `W = 1`, largest at
    `W = k / lambda`, and falls to 0 on both sides: the farther a response is from the policy, the less its tokens
    learn, and no token is clipped. Tokens with `A >= 0` have `k_positive` and `lambda_positive`, all other tokens
    `k_negative` and `lambda_negative`.

    W is computed as a logarithm, and the log-ratio of each token and of the response is bounded to +-`MAX_LOG_RATIO`.
    phi has the same upper bound. With `correction=bypass` or stale samples, W is the ratio to the policy that sampled,
    as in the paper.

    Args:
        k_positive: exponent of W for tokens with advantage 0 or more; larger values reduce the weight of responses that
            the policy has become less likely to give.
        lambda_positive: rate of the decay for the same tokens; larger values reduce the weight of responses that the
            policy has become more likely to give.
        k_negative: exponent of W for tokens with negative advantage.
        lambda_negative: rate of the decay for tokens with negative advantage.

    Returns:
        Loss [B, T] and metrics `sequence_weight` (phi), `ppo_kl` [B, T].

    Raises:
        ValueError: an exponent is negative, or a rate is not above 0.

    Source: https://arxiv.org/abs/2602.10693, the kernel of gamma shape; bounds and default values from
    https://github.com/FloyedShen/VESPO, `recipe/vespo/code/core_algos.py`.
    """
    check_ranges(float, NOT_NEGATIVE, k_positive=k_positive, k_negative=k_negative)
    check_ranges(float, ABOVE_0, lambda_positive=lambda_positive, lambda_negative=lambda_negative)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    log_ratio_BT = bounded_log_ratio(log_probs_BT.detach(), old_log_probs_BT)
    sequence_B1 = log_ratio_BT.sum(dim=-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    positive_BT = advantages_BT >= 0
    k_BT = torch.full_like(advantages_BT, k_negative).masked_fill(positive_BT, k_positive)
    lambda_BT = torch.full_like(advantages_BT, lambda_negative).masked_fill(positive_BT, lambda_positive)
    weight_BT = (k_BT * sequence_B1 + lambda_BT * (1 - sequence_B1.exp())).clamp(max=MAX_LOG_RATIO).exp()
    return -weight_BT * advantages_BT * log_probs_BT, {"sequence_weight": weight_BT, "ppo_kl": -log_ratio_BT}


def dro(
    *, log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct reward optimization: `-(A log_probs - beta / 2 (log_probs - old_log_probs)^2)`.

    The log-ratio is not bounded, because the penalty must pull the policy back from any distance.

    Args:
        beta: weight of the penalty, above 0.

    Returns:
        Loss [B, T] and metric `ppo_kl` [B, T].

    Raises:
        ValueError: `beta` is not above 0. Without the penalty the loss is `reinforce`.

    Source: https://arxiv.org/abs/2405.19107, per token.
    """
    if not beta > 0:
        raise ValueError(f"beta={beta}: must be above 0; for no penalty use the policy loss reinforce")
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    log_ratio_BT = log_probs_BT - old_log_probs_BT
    loss_BT = beta / 2 * log_ratio_BT.square() - advantages_BT * log_probs_BT
    return loss_BT, {"ppo_kl": -log_ratio_BT.detach()}
