"""A smooth pull towards the old policy in place of a clip: SAPO's gate and DRO's quadratic penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.policy_losses.inputs import bounded_log_ratio, check_positive, zero_masked


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
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy that the ratio is taken against.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        tau_positive: how fast the gradient fades away from ratio 1 where the advantage is positive.
        tau_negative: the same where it is not.

    Returns:
        Loss [B, T] and metric `ppo_kl` [B, T].

    Raises:
        ValueError: a temperature that is not above 0.

    Source: https://arxiv.org/abs/2511.20347.
    """
    check_positive(tau_positive=tau_positive, tau_negative=tau_negative)
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT, old_log_probs_BT, advantages_BT
    )
    log_ratio_BT = bounded_log_ratio(log_probs_BT, old_log_probs_BT)
    tau_BT = torch.full_like(advantages_BT, tau_negative).masked_fill(advantages_BT > 0, tau_positive)
    gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (log_ratio_BT.exp() - 1))
    return -gate_BT * advantages_BT, {"ppo_kl": -log_ratio_BT.detach()}


def dro(
    *, log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct reward optimization: `-(A log_probs - beta / 2 (log_probs - old_log_probs)^2)`.

    The log-ratio is not bounded: the penalty must pull back however far the policy went.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        old_log_probs_BT: of the policy to stay close to.
        advantages_BT: advantage of each token.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        beta: weight of the penalty.

    Returns:
        Loss [B, T] and metric `ppo_kl` [B, T].

    Raises:
        ValueError: beta is not above 0: without the penalty this is `reinforce`.

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
