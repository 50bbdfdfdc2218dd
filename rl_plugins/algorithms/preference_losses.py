"""Losses of preference optimization, for pairs of responses and for single responses labelled good or bad.

The signature of a loss names its inputs: a loss that names log-probabilities under the reference needs a reference
model. A loss depends on its own pair only (KTO: also on one number for the whole batch), so its gradient does not
depend on the split into micro-batches; the caller averages losses and metrics over the global batch.

Axes: `N` pairs, or single responses (KTO). Log-probabilities are in nats, summed over the tokens of a response.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.registry import Registry
from rl_plugins.config.settings import ABOVE_0, NOT_NEGATIVE, check_ranges

PreferenceLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def dpo(
    *,
    chosen_log_probs_N: Tensor,
    rejected_log_probs_N: Tensor,
    ref_chosen_log_probs_N: Tensor,
    ref_rejected_log_probs_N: Tensor,
    chosen_lengths_N: Tensor | None = None,
    rejected_lengths_N: Tensor | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Larger gain over the reference for the better response: `-(1-s) log sigmoid(beta z) - s log sigmoid(-beta z)`.

    `z` is the log-ratio of policy to reference of the chosen response, minus the log-ratio of the rejected response.

    When: pairs of a better and a worse response exist; the usual first choice. If many pairs are in the wrong order,
    `label_smoothing` makes the loss conservative DPO (cDPO).

    Args:
        chosen_lengths_N: number of tokens in the better response; needed for `length_normalized`.
        rejected_lengths_N: number of tokens in the worse response; needed for `length_normalized`.
        beta: strength of the reference; the larger, the closer the policy stays to the reference. Above 0.
        label_smoothing: `s`, the share of pairs in the wrong order (conservative DPO); below 0.5.
        length_normalized: divide each log-ratio by the length of its response.

    Returns:
        Loss [N], and the metrics `accuracy` (a tie is wrong), `margin`, `chosen_reward` and `rejected_reward` [N]; a
        reward is beta times the log-ratio.

    Raises:
        ValueError: an option is out of range, or lengths are missing.

    Source: DPO https://arxiv.org/abs/2305.18290 eq. 7; label smoothing https://ericmitchell.ai/cdpo.pdf; length
    normalisation Tulu 3 https://arxiv.org/abs/2411.15124.
    """
    check_ranges(float, ABOVE_0, beta=beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing}: must be 0 or more and below 0.5")
    chosen_reward_N, rejected_reward_N = (
        beta * _log_ratio(log_probs_N, ref_log_probs_N, lengths_N, length_normalized)
        for log_probs_N, ref_log_probs_N, lengths_N in (
            (chosen_log_probs_N, ref_chosen_log_probs_N, chosen_lengths_N),
            (rejected_log_probs_N, ref_rejected_log_probs_N, rejected_lengths_N),
        )
    )
    margin_N = chosen_reward_N - rejected_reward_N
    loss_N = -(1 - label_smoothing) * logsigmoid(margin_N) - label_smoothing * logsigmoid(-margin_N)
    return loss_N, _pair_metrics(chosen_reward_N, rejected_reward_N)


def ipo(
    *,
    chosen_log_probs_N: Tensor,
    rejected_log_probs_N: Tensor,
    ref_chosen_log_probs_N: Tensor,
    ref_rejected_log_probs_N: Tensor,
    chosen_lengths_N: Tensor | None = None,
    rejected_lengths_N: Tensor | None = None,
    beta: float = 0.1,
    length_normalized: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Constant difference of the log-ratios, in place of an ever larger difference: `(z - 1 / (2 beta))^2`.

    `z` is the difference of two log-ratios, as in `dpo`.

    When: DPO overfits, because pairs are few or the same pair always has the same preference.

    Args:
        chosen_lengths_N: number of tokens in the better response; needed for `length_normalized`.
        rejected_lengths_N: number of tokens in the worse response; needed for `length_normalized`.
        beta: strength of the reference, above 0; the paper's tau.
        length_normalized: divide each log-ratio by the length of its response.

    Returns:
        Loss [N] and metrics [N] as `dpo`.

    Raises:
        ValueError: `beta` is not above 0, or lengths are missing.

    Source: https://arxiv.org/abs/2310.12036 eq. 17.
    """
    check_ranges(float, ABOVE_0, beta=beta)
    chosen_ratio_N = _log_ratio(chosen_log_probs_N, ref_chosen_log_probs_N, chosen_lengths_N, length_normalized)
    rejected_ratio_N = _log_ratio(rejected_log_probs_N, ref_rejected_log_probs_N, rejected_lengths_N, length_normalized)
    loss_N = (chosen_ratio_N - rejected_ratio_N - 1 / (2 * beta)).square()
    return loss_N, _pair_metrics(beta * chosen_ratio_N, beta * rejected_ratio_N)


def rpo(
    *,
    chosen_log_probs_N: Tensor,
    rejected_log_probs_N: Tensor,
    ref_chosen_log_probs_N: Tensor,
    ref_rejected_log_probs_N: Tensor,
    chosen_lengths_N: Tensor,
    rejected_lengths_N: Tensor | None = None,
    beta: float = 0.1,
    nll_weight: float = 1.0,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO with a likelihood term for the better response: `dpo - nll_weight * log pi(chosen) / its length`.

    When: under DPO the better responses become less likely, too, as in reasoning.

    Args:
        rejected_lengths_N: number of tokens in the worse response; needed for `length_normalized`.
        beta: strength of the reference, as in `dpo`.
        nll_weight: weight of the negative log-likelihood per token, 0 or more; the paper's alpha.
        label_smoothing: share of pairs in the wrong order, as in `dpo`.
        length_normalized: divide each log-ratio by the length of its response; the likelihood is always divided.

    Returns:
        Loss [N], and the metrics of `dpo` and `nll` (per token) [N].

    Raises:
        ValueError: an option is out of range, or lengths are missing.

    Source: Iterative RPO https://arxiv.org/abs/2404.19733.
    """
    check_ranges(float, NOT_NEGATIVE, nll_weight=nll_weight)
    loss_N, metrics = dpo(
        chosen_log_probs_N=chosen_log_probs_N,
        rejected_log_probs_N=rejected_log_probs_N,
        ref_chosen_log_probs_N=ref_chosen_log_probs_N,
        ref_rejected_log_probs_N=ref_rejected_log_probs_N,
        chosen_lengths_N=chosen_lengths_N,
        rejected_lengths_N=rejected_lengths_N,
        beta=beta,
        label_smoothing=label_smoothing,
        length_normalized=length_normalized,
    )
    nll_N = -_per_token(chosen_log_probs_N, chosen_lengths_N)
    return loss_N + nll_weight * nll_N, {**metrics, "nll": nll_N.detach()}


def orpo(
    *,
    chosen_log_probs_N: Tensor,
    rejected_log_probs_N: Tensor,
    chosen_lengths_N: Tensor,
    rejected_lengths_N: Tensor,
    odds_weight: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Fine-tuning on the better response, with better odds than the worse one: `nll - odds_weight * log sigmoid(o)`.

    `o = log odds(chosen) - log odds(rejected)`, with `odds = p / (1 - p)` and `p` the geometric mean of the
    probabilities of the tokens. No reference model.

    When: the model is not fine-tuned yet, or memory does not suffice for a reference model.

    Args:
        odds_weight: weight of the odds ratio, above 0; the paper's lambda.

    Returns:
        Loss [N], the metrics of `dpo` with `odds_weight` times the log-prob per token as rewards, and `nll` (per
        token) and `log_odds_ratio` [N].

    Raises:
        ValueError: `odds_weight` is not above 0.

    Source: https://arxiv.org/abs/2403.07691.
    """
    check_ranges(float, ABOVE_0, odds_weight=odds_weight)
    chosen_mean_N = _per_token(chosen_log_probs_N, chosen_lengths_N)
    rejected_mean_N = _per_token(rejected_log_probs_N, rejected_lengths_N)
    log_odds_ratio_N = _log_odds(chosen_mean_N) - _log_odds(rejected_mean_N)
    loss_N = -chosen_mean_N - odds_weight * logsigmoid(log_odds_ratio_N)
    return loss_N, {
        **_pair_metrics(odds_weight * chosen_mean_N, odds_weight * rejected_mean_N),
        "nll": -chosen_mean_N.detach(),
        "log_odds_ratio": log_odds_ratio_N.detach(),
    }


def simpo(
    *,
    chosen_log_probs_N: Tensor,
    rejected_log_probs_N: Tensor,
    chosen_lengths_N: Tensor,
    rejected_lengths_N: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Higher likelihood per token for the better response, by a margin: `-log sigmoid(beta (l_w - l_l) - gamma)`.

    `l` is the log-prob of a response divided by its length. No reference model.

    When: responses grow longer under DPO, or memory does not suffice for a reference model; `beta` and `gamma` need
    tuning.

    Args:
        beta: scale of the rewards, above 0.
        gamma: target difference of the rewards, 0 or more.

    Returns:
        Loss [N] and metrics [N] as `dpo`; a reward is beta times the log-prob per token.

    Raises:
        ValueError: `beta` is not above 0, or `gamma` is below 0.

    Source: https://arxiv.org/abs/2405.14734.
    """
    check_ranges(float, ABOVE_0, beta=beta)
    check_ranges(float, NOT_NEGATIVE, gamma=gamma)
    chosen_reward_N = beta * _per_token(chosen_log_probs_N, chosen_lengths_N)
    rejected_reward_N = beta * _per_token(rejected_log_probs_N, rejected_lengths_N)
    loss_N = -logsigmoid(chosen_reward_N - rejected_reward_N - gamma)
    return loss_N, _pair_metrics(chosen_reward_N, rejected_reward_N)


def kto(
    *,
    log_probs_N: Tensor,
    ref_log_probs_N: Tensor,
    desirable_N: Tensor,
    reference_point: Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gain over the reference for good responses, loss for bad responses, with diminishing returns on both sides.

    With the log-ratio `r` of policy to reference and the reference point `z0`: `w_d (1 - sigmoid(beta (r - z0)))` of
    a desirable response, `w_u (1 - sigmoid(beta (z0 - r)))` of an undesirable response.

    When: every response is labelled good or bad by itself, not in pairs.

    Args:
        desirable_N: bool, True for good responses.
        reference_point: z0, a scalar without gradient: distance of the policy from the reference, from
            `kto_reference_point`.
        beta: strength of the reference, above 0.
        desirable_weight: w_d, 0 or more; weights that compensate for unequal numbers of good and bad responses are
            usual.
        undesirable_weight: w_u, 0 or more.

    Returns:
        Loss [N], and the metrics `accuracy` (1 if a response is on the right side of the reference point) and `reward`
        (beta times the log-ratio) [N].

    Raises:
        ValueError: an option is out of range.

    Source: https://arxiv.org/abs/2402.01306.
    """
    check_ranges(float, ABOVE_0, beta=beta)
    check_ranges(float, NOT_NEGATIVE, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    desirable_N = desirable_N.bool()
    ratio_N = log_probs_N - ref_log_probs_N
    distance_N = ratio_N - reference_point.detach()
    gain_N = torch.where(desirable_N, distance_N, -distance_N)
    ones_N = torch.ones_like(ratio_N)
    weight_N = torch.where(desirable_N, desirable_weight * ones_N, undesirable_weight * ones_N)
    # sigmoid(-x) in place of 1 - sigmoid(x), which loses precision for large x.
    loss_N = weight_N * torch.sigmoid(-beta * gain_N)
    return loss_N, {"accuracy": (gain_N > 0).float(), "reward": beta * ratio_N.detach()}


def kto_reference_point(
    *,
    mismatched_log_probs_N: Tensor,
    mismatched_ref_log_probs_N: Tensor,
    sum_over_ranks: Collective = one_rank,
) -> Tensor:
    """Estimate KTO's distance of the policy from the reference on responses to other prompts; 0 or more. Collective.

    Args:
        mismatched_log_probs_N: log-probability under the policy of responses that belong to another prompt; N may
            differ between ranks and be 0.
        mismatched_ref_log_probs_N: log-probability of the same responses under the reference.

    Returns:
        `max(0, mean log-ratio)` over all ranks, a scalar without gradient; 0 without responses.

    Source: https://arxiv.org/abs/2402.01306.
    """
    ratio_N = (mismatched_log_probs_N - mismatched_ref_log_probs_N).detach().double()
    total, count = sum_over_ranks(torch.stack([ratio_N.sum(), ratio_N.new_tensor(len(ratio_N))]))
    return (total / count.clamp(min=1)).clamp(min=0)


PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry(
    "rl_plugins.preference_losses",
    {"dpo": dpo, "ipo": ipo, "rpo": rpo, "kto": kto, "orpo": orpo, "simpo": simpo},
)


def _per_token(log_probs_N: Tensor, lengths_N: Tensor) -> Tensor:
    return log_probs_N / lengths_N.to(log_probs_N).clamp(min=1)


def _log_ratio(
    log_probs_N: Tensor, ref_log_probs_N: Tensor, lengths_N: Tensor | None, length_normalized: bool
) -> Tensor:
    ratio_N = log_probs_N - ref_log_probs_N.detach()
    if not length_normalized:
        return ratio_N
    if lengths_N is None:
        raise ValueError("length_normalized needs chosen_lengths_N and rejected_lengths_N")
    return _per_token(ratio_N, lengths_N)


def _log_odds(log_probs_N: Tensor) -> Tensor:
    # A probability that rounds to 1 has infinite odds and a NaN gradient.
    log_probs_N = log_probs_N.clamp(max=-torch.finfo(log_probs_N.dtype).eps)
    return log_probs_N - torch.log(-torch.expm1(log_probs_N))


def _pair_metrics(chosen_reward_N: Tensor, rejected_reward_N: Tensor) -> dict[str, Tensor]:
    margin_N = (chosen_reward_N - rejected_reward_N).detach()
    return {
        "accuracy": (margin_N > 0).float(),
        "margin": margin_N,
        "chosen_reward": chosen_reward_N.detach(),
        "rejected_reward": rejected_reward_N.detach(),
    }
