"""Values and gradients of the policy losses: by hand for every branch, and against finite differences."""

from __future__ import annotations

import inspect
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate, local_counts
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES, SELECTIONS
from rl_plugins.algorithms.policy_losses.clipped import gmpo
from rl_plugins.algorithms.policy_losses.trust_region import vespo
from rl_plugins.tests.algorithms.batches import Batch, make_batch
from rl_plugins.tests.algorithms.policy_loss_cases import OPTIONS, loss_of
from rl_plugins.tests.loops import for_each

WIDTHS = {"clip_low": 0.2, "clip_high": 0.3}
YES, NO = {"selected_BT": torch.tensor([[True]])}, {"selected_BT": torch.tensor([[False]])}
TOPS = {
    "teacher_top_log_probs_BTK": torch.tensor([[[0.5, 0.25]]]).double().log(),
    "top_log_probs_BTK": torch.tensor([[[0.25, 0.25]]]).double().log(),
    "policy_weight": 0.5,
}


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def binary_kl(before: float, now: float) -> float:
    return before * log(before / now) + (1 - before) * log((1 - before) / (1 - now))


# Loss, options, old and current probability, advantage; expected loss, its derivative by the log-prob, and metric.
BY_HAND: list[tuple[str, dict[str, Any], float, float, float, float, float, dict[str, float]]] = [
    ("reinforce", {}, 0.5, 0.25, 2.0, -2 * log(0.25), -2.0, {"ppo_kl": log(2)}),
    ("gpg", {}, 0.5, 0.25, -3.0, 3 * log(0.25), 3.0, {"ppo_kl": log(2)}),
    # CISPO: inside the range, above, below, and without a lower bound.
    ("cispo", WIDTHS, 0.5, 0.55, 2.0, -1.1 * 2 * log(0.55), -2.2, {"clip_fraction": 0}),
    ("cispo", WIDTHS, 0.2, 0.4, 2.0, -1.3 * 2 * log(0.4), -2.6, {"clip_fraction": 1}),
    ("cispo", WIDTHS, 0.2, 0.4, -2.0, 1.3 * 2 * log(0.4), 2.6, {"clip_fraction": 1}),
    ("cispo", WIDTHS, 0.5, 0.25, -2.0, 0.8 * 2 * log(0.25), 1.6, {"clip_fraction": 1}),
    ("cispo", {"clip_low": 1.0}, 0.5, 0.005, -2.0, 0.01 * 2 * log(0.005), 0.02, {"clip_fraction": 0}),
    # DRO: 1/2 beta x^2 - A l.
    ("dro", {"beta": 0.5}, 0.5, 0.25, 2.0, 0.25 * log(2) ** 2 - 2 * log(0.25), -0.5 * log(2) - 2, {}),
    ("dro", {"beta": 2.0}, 0.25, 0.5, -1.0, log(2) ** 2 + log(0.5), 2 * log(2) + 1, {"ppo_kl": -log(2)}),
    # SAPO: at ratio 1 the slope is the slope of REINFORCE; elsewhere, less.
    ("sapo", {}, 0.5, 0.5, 2.0, -2 * 4 * 0.5, -2.0, {}),
    ("sapo", {}, 0.5, 0.5, -2.0, 2 * 4 / 1.05 * 0.5, 2.0, {}),
    ("sapo", {}, 0.2, 0.4, 1.0, -4 * sigmoid(1), -4 * 2 * sigmoid(1) * sigmoid(-1), {}),
    (
        "sapo",
        {"tau_negative": 3.0},
        0.4,
        0.2,
        -1.0,
        4 / 3 * sigmoid(-1.5),
        4 * 0.5 * sigmoid(1.5) * sigmoid(-1.5),
        {},
    ),
    # VESPO: W = 1/2 and 2, with the exponent and the rate of the sign of the advantage.
    ("vespo", {}, 0.5, 0.5, 2.0, -2 * log(0.5), -2.0, {"sequence_weight": 1.0}),
    ("vespo", {}, 0.5, 0.25, 2.0, -0.25 * exp(1.5) * 2 * log(0.25), -0.5 * exp(1.5), {"ppo_kl": log(2)}),
    ("vespo", {}, 0.2, 0.4, -1.0, 8 * exp(-2) * log(0.4), 8 * exp(-2), {"sequence_weight": 8 * exp(-2)}),
    ("vespo", {"k_positive": 0.0}, 0.2, 0.4, 1.0, -exp(-3) * log(0.4), -exp(-3), {"sequence_weight": exp(-3)}),
    # DPPO by total variation: kept, dropped, moved but back towards the old policy (both ways), capped.
    ("dppo_tv", {}, 0.5, 0.6, 1.0, -1.2 * log(0.6), -1.2, {"clip_fraction": 0}),
    ("dppo_tv", {}, 0.5, 0.75, 1.0, 0.0, 0.0, {"clip_fraction": 1}),
    ("dppo_tv", {}, 0.5, 0.75, -1.0, 1.5 * log(0.75), 1.5, {"clip_fraction": 0}),
    ("dppo_tv", {}, 0.5, 0.25, -1.0, 0.0, 0.0, {"clip_fraction": 1}),
    ("dppo_tv", {}, 0.5, 0.25, 1.0, -0.5 * log(0.25), -0.5, {"clip_fraction": 0}),
    ("dppo_tv", {"low": 0.3}, 0.5, 0.25, -1.0, 0.5 * log(0.25), 0.5, {"clip_fraction": 0}),
    ("dppo_tv", {}, 0.001, 0.05, 1.0, -20 * log(0.05), -20.0, {"cap_fraction": 1, "clip_fraction": 0}),
    ("dppo_tv", {"cap": 3.0}, 0.1, 0.25, 1.0, -2.5 * log(0.25), -2.5, {"cap_fraction": 0}),
    # DPPO by KL, whose bound lies between the two divergences.
    ("dppo_kl", {"high": binary_kl(0.5, 0.7)}, 0.5, 0.69, 1.0, -1.38 * log(0.69), -1.38, {"clip_fraction": 0}),
    ("dppo_kl", {"high": binary_kl(0.5, 0.7)}, 0.5, 0.71, 1.0, 0.0, 0.0, {"clip_fraction": 1}),
    ("dppo_kl", {"high": 0.01}, 0.5, 0.1, 1.0, -0.2 * log(0.1), -0.2, {"clip_fraction": 0}),
    ("dppo_kl", {"low": binary_kl(0.5, 0.3)}, 0.5, 0.31, -1.0, 0.62 * log(0.31), 0.62, {"clip_fraction": 0}),
    ("dppo_kl", {"low": binary_kl(0.5, 0.3)}, 0.5, 0.29, -1.0, 0.0, 0.0, {"clip_fraction": 1}),
    ("dppo_kl", {"low": 0.01}, 0.5, 0.9, -1.0, 1.8 * log(0.9), 1.8, {"clip_fraction": 0}),
    ("dppo_kl", {"cap": 3.0}, 0.01, 0.1, 1.0, -3 * log(0.1), -3.0, {"cap_fraction": 1}),
    ("dppo_kl", {}, 1.0 + 1e-7, 1.0, 1.0, 0.0, -1.0, {"clip_fraction": 0}),
    ("dppo_kl", {}, 1.0, 1.0 + 1e-7, 1.0, -1e-7, -1.0, {"clip_fraction": 0}),
    # GSPO and GMPO of a response of one token.
    ("gspo", WIDTHS, 0.5, 0.55, 2.0, -2.2, -2.2, {"clip_fraction": 0}),
    ("gspo", WIDTHS, 0.2, 0.4, 2.0, -2.6, 0.0, {"clip_fraction": 1}),
    ("gspo", WIDTHS, 0.2, 0.4, -2.0, 4.0, 4.0, {"clip_fraction": 0}),
    ("gspo", WIDTHS, 0.5, 0.25, -2.0, 1.6, 0.0, {"clip_fraction": 1}),
    ("gspo", WIDTHS, 0.5, 0.25, 2.0, -1.0, -1.0, {"clip_fraction": 0}),
    ("gspo", WIDTHS, 1e-9, 0.9, -1.0, exp(10), 0.0, {}),
    ("gmpo", {}, 0.5, 0.55, 2.0, -2.2, -2.2, {"clip_fraction": 0}),
    ("gmpo", {"clip_high": 0.3}, 0.2, 0.4, 2.0, -2 * exp(0.3), 0.0, {"clip_fraction": 1}),
    ("gmpo", {}, 0.2, 0.4, -2.0, 4.0, 4.0, {"clip_fraction": 0}),
    ("gmpo", {"clip_low": 0.5}, 0.5, 0.25, -2.0, 2 * exp(-0.5), 0.0, {"clip_fraction": 1}),
    ("gmpo", {}, 0.5, 0.25, 2.0, -1.0, -1.0, {"clip_fraction": 0}),
    ("gmpo", {}, 0.5, 0.25, 0.0, 0.0, 0.0, {"clip_fraction": 0}),
    # Clip-Cov: PPO's branches, no dual clip, and nothing where selected.
    ("clip_cov", {**WIDTHS, **NO}, 0.5, 0.55, 2.0, -2.2, -2.2, {"clip_fraction": 0, "selected_fraction": 0}),
    ("clip_cov", {**WIDTHS, **NO}, 0.2, 0.4, 2.0, -2.6, 0.0, {"clip_fraction": 1}),
    ("clip_cov", {**WIDTHS, **NO}, 0.5, 0.25, -2.0, 1.6, 0.0, {"clip_fraction": 1}),
    ("clip_cov", {**WIDTHS, **NO}, 0.01, 0.4, -2.0, 80.0, 80.0, {"clip_fraction": 0}),
    ("clip_cov", {**WIDTHS, **YES}, 0.5, 0.55, 2.0, 0.0, 0.0, {"clip_fraction": 0, "selected_fraction": 1}),
    # KL-Cov: no clip, and a penalty on both sides where selected.
    ("kl_cov", NO, 0.1, 0.5, 2.0, -10.0, -10.0, {"selected_fraction": 0}),
    ("kl_cov", YES, 0.1, 0.5, 2.0, -10 + log(5), -10 + 1.0, {"selected_fraction": 1}),
    ("kl_cov", {**YES, "coefficient": 0.4}, 0.5, 0.25, 2.0, -1 + 0.4 * log(2), -1 - 0.4, {"ppo_kl": log(2)}),
    ("kl_cov", YES, 0.5, 0.5, 2.0, -2.0, -2.0, {}),
    ("kl_cov", YES, 1e-12, 0.9, 0.0, log(0.9e12), 1.0, {"ppo_kl": -20}),
    # Distillation beside half of PPO: the teacher is twice as sure of one of the two tokens.
    ("forward_kl_top_k", TOPS, 0.5, 0.55, 2.0, 0.5 * log(2) - 1.1, -1.1, {"teacher_mass": 0.75, "student_mass": 0.5}),
    ("forward_kl_top_k", {**TOPS, "loss_max_clamp": 0.1}, 0.5, 0.55, 2.0, 0.1 - 1.1, -1.1, {"ppo_kl": -log(1.1)}),
]


@for_each(("name", "options", "before", "now", "advantage", "value", "slope", "metrics"), BY_HAND)
def test_policy_losses_of_one_token_match_a_computation_by_hand(
    name: str,
    options: dict[str, Any],
    before: float,
    now: float,
    advantage: float,
    value: float,
    slope: float,
    metrics: dict[str, float],
) -> None:
    log_probs = torch.tensor([[log(now)]], dtype=torch.float64, requires_grad=True)
    loss, measured = POLICY_LOSSES[name](
        log_probs_BT=log_probs,
        old_log_probs_BT=torch.tensor([[log(before)]], dtype=torch.float64),
        advantages_BT=torch.tensor([[advantage]], dtype=torch.float64),
        response_mask_BT=torch.ones(1, 1),
        **options,
    )
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    # 1e-6: DPPO's KL keeps its logarithm finite with 1e-8.
    assert loss.item() == pytest.approx(value, rel=1e-6, abs=1e-11)
    assert gradient.item() == pytest.approx(slope, rel=1e-6, abs=1e-12)
    for metric, expected in metrics.items():
        assert measured[metric].item() == pytest.approx(expected), metric


def test_cases_by_hand_contain_every_policy_loss() -> None:
    assert {case[0] for case in BY_HAND} | {"ppo_clip"} == set(POLICY_LOSSES) == set(OPTIONS)


# Stop-gradients make the derivative differ from the slope of the value in the others.
@for_each("name", ["ppo_clip", "reinforce", "gpg", "dro", "sapo", "gmpo", "clip_cov", "kl_cov"])
@for_each("seed", range(2))
def test_policy_loss_gradients_agree_with_finite_differences(name: str, seed: int) -> None:
    batch = make_batch(seed, width=8)
    if name == "kl_cov":
        # Beside e^20 the penalty drowns in the rounding error of a finite difference.
        batch.old = batch.log_probs + (batch.old - batch.log_probs).clamp(-5, 5)

    def loss(log_probs: Tensor) -> Tensor:
        return loss_of(name, batch, log_probs)[0]

    assert torch.autograd.gradcheck(loss, batch.log_probs.clone().requires_grad_(), rtol=1e-5, atol=1e-6)


@for_each("name", ["reinforce", "gpg", "cispo", "dppo_tv", "dppo_kl", "vespo"])
def test_policy_losses_pass_no_gradient_to_the_weight_of_a_log_prob(name: str) -> None:
    """The loss is a constant times the log-prob, and the constant is the gradient."""
    batch = make_batch(3)
    log_probs = batch.log_probs.clone().requires_grad_()
    loss, _ = loss_of(name, batch, log_probs)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient * batch.log_probs, loss.detach(), rtol=1e-12, atol=1e-12)
    assert gradient.any()


def mean_over_sequences(loss: Tensor, mask: Tensor) -> Tensor:
    return aggregate(loss, mask, "seq-mean-token-mean", GlobalCounts(*local_counts(mask).tolist()))


def with_equal_advantages(batch: Batch) -> Batch:
    batch.advantages = batch.advantages[:, 5:6].expand_as(batch.advantages).clone()
    return batch


def gspo_of_sequences(log_probs: Tensor, batch: Batch) -> Tensor:
    """The paper's objective, one sequence after the other."""
    losses = []
    for i in range(len(batch.mask)):
        valid = batch.mask[i].bool()
        if valid.any():
            ratio = ((log_probs[i] - batch.old[i])[valid].mean()).clamp(max=10).exp()
            advantage = batch.advantages[i, 0]
            losses.append(-torch.minimum(advantage * ratio, advantage * ratio.clamp(0.9, 1.2)))
    return torch.stack(losses).mean()


def gmpo_of_sequences(log_probs: Tensor, batch: Batch) -> Tensor:
    """The paper's objective, one sequence after the other, in products of ratios."""
    losses = []
    for i in range(len(batch.mask)):
        valid = batch.mask[i].bool()
        if valid.any():
            advantage = batch.advantages[i, 0]
            ratios = (log_probs[i] - batch.old[i])[valid].exp()
            clipped = ratios.clamp(exp(-0.4), exp(0.4))
            kept = torch.minimum(ratios, clipped) if advantage > 0 else torch.maximum(ratios, clipped)
            losses.append(-advantage * kept.prod() ** (1 / len(kept)))
    return torch.stack(losses).mean()


@for_each("seed", range(3))
def test_gmpo_with_weights_and_without_clipping_takes_the_ratio_to_the_policy_that_sampled(seed: int) -> None:
    batch, other = make_batch(seed), make_batch(seed + 10)
    rollout = torch.where(batch.mask.bool(), batch.old + 0.1 * other.advantages, torch.nan)
    given: dict[str, Any] = {
        # The log-ratio of a token without an advantage counts as 0, whatever the weight.
        "advantages_BT": torch.where(batch.advantages == 0, 1, batch.advantages),
        "response_mask_BT": batch.mask,
        "clip_low": 1e9,
        "clip_high": 1e9,
    }
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    for old, weights in ((batch.old, (batch.old - rollout).exp()), (rollout, None)):
        leaf = batch.log_probs.clone().requires_grad_()
        loss, _ = gmpo(log_probs_BT=leaf, old_log_probs_BT=old, rollout_weights_BT=weights, **given)
        losses.append(loss)
        gradients += torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_vespo_weighs_every_token_by_the_product_of_the_ratios_of_the_response() -> None:
    log_probs = torch.tensor([[0.4, 0.5, 0.3], [0.9, 0.2, 0.7]]).double().log().requires_grad_()
    old = torch.tensor([[0.2, 0.25, 0.6], [0.3, 0.1, 0.7]]).double().log()
    # The last token of the second response is an observation.
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]).double()
    advantages = torch.tensor([[3.0, 3.0, 3.0], [-1.0, 2.0, 5.0]]).double()
    loss, metrics = vespo(log_probs_BT=log_probs, old_log_probs_BT=old, advantages_BT=advantages, response_mask_BT=mask)
    down, up = 6**3 * exp(2 * (1 - 6)), 6**2 * exp(3 * (1 - 6))
    expected = torch.tensor(
        [[2**2 * exp(3 * (1 - 2))] * 3, [down, up, metrics["sequence_weight"][1, 2].item()]]
    ).double()
    torch.testing.assert_close(metrics["sequence_weight"], expected)
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -expected * advantages * mask)


def test_gmpo_leaves_a_token_of_weight_0_out_of_the_means() -> None:
    log_probs = torch.tensor([[0.5, 0.1, 0.4], [0.3, 0.3, 0.3]]).double().log().requires_grad_()
    given: dict[str, Any] = {
        "old_log_probs_BT": torch.full((2, 3), 0.2).double().log(),
        "advantages_BT": torch.tensor([[1.0, 9.0, 3.0], [1.0, 1.0, 1.0]]).double(),
        "response_mask_BT": torch.ones(2, 3).double(),
        "clip_low": 10.0,
        "clip_high": 10.0,
    }
    weights = torch.tensor([[2.0, 0.0, 0.5], [0.0, 0.0, 0.0]]).double()
    loss, _ = gmpo(log_probs_BT=log_probs, rollout_weights_BT=weights, **given)
    ratio = (0.5 / 0.2 * 2 * 0.4 / 0.2 * 0.5) ** 0.5
    torch.testing.assert_close(loss, torch.tensor([[-2 * ratio] * 3, [0.0] * 3]).double())
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0, 1] == 0 and not log_probs.grad[1].any() and log_probs.grad[0, [0, 2]].all()


@for_each(("name", "paper"), [("gspo", gspo_of_sequences), ("gmpo", gmpo_of_sequences)])
@for_each("seed", range(4))
def test_gspo_and_gmpo_match_the_objectives_of_the_papers(name: str, paper: Any, seed: int) -> None:
    batch = with_equal_advantages(make_batch(seed))
    log_probs = batch.log_probs.clone().requires_grad_()
    loss = mean_over_sequences(loss_of(name, batch, log_probs)[0], batch.mask)
    expected = paper(log_probs, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-9)
    assert gradient.any()


@for_each("name", sorted({*POLICY_LOSSES} - {"dro"}))
def test_policy_losses_on_policy_have_the_gradient_of_reinforce(name: str) -> None:
    """At ratio 1, equal advantages in a response and no penalty, every loss is the policy gradient."""
    batch = with_equal_advantages(make_batch(5))
    batch.old = batch.log_probs.clone()
    log_probs = batch.log_probs.clone().requires_grad_()
    loss, _ = loss_of(name, batch, log_probs)
    (gradient,) = torch.autograd.grad(mean_over_sequences(loss, batch.mask), log_probs)
    plain = mean_over_sequences(-batch.advantages * log_probs, batch.mask)
    (expected,) = torch.autograd.grad(plain, log_probs)
    if name == "clip_cov":
        expected = expected * (torch.arange(expected.numel()).reshape(expected.shape) % 3 != 0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_policy_losses_with_selected_tokens_have_a_selection() -> None:
    needing = {name for name, loss in POLICY_LOSSES.items() if "selected_BT" in inspect.signature(loss).parameters}
    assert needing == set(SELECTIONS)


@for_each(
    ("name", "options", "message"),
    [
        ("cispo", {"clip_low": -0.1}, "clip_low=-0.1: must be 0 or more"),
        ("gspo", {"clip_high": -0.1}, "clip_high=-0.1: must be 0 or more"),
        ("gmpo", {"clip_low": float("nan")}, "clip_low=nan: must be a finite number"),
        ("clip_cov", {"clip_low": -1.0, **NO}, "clip_low=-1.0: must be 0 or more"),
        ("kl_cov", {"coefficient": -1.0, **NO}, "coefficient=-1.0: must be 0 or more"),
        ("dppo_tv", {"low": -0.2}, "low=-0.2: must be 0 or more"),
        ("dppo_kl", {"cap": 0.0}, "cap=0.0: must be above 0"),
        ("sapo", {"tau_positive": 0.0}, "tau_positive=0.0: must be above 0"),
        ("vespo", {"k_negative": -1.0}, "k_negative=-1.0: must be 0 or more"),
        ("vespo", {"lambda_positive": 0.0}, "lambda_positive=0.0: must be above 0"),
        ("dro", {"beta": 0.0}, "beta=0.0: must be above 0; for no penalty use the policy loss reinforce"),
    ],
)
def test_policy_losses_refuse_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=message):
        POLICY_LOSSES[name](log_probs_BT=one, old_log_probs_BT=one, advantages_BT=one, response_mask_BT=one, **options)
