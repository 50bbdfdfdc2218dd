"""Every function against a second implementation: float64 NumPy, written from the formulas by another author."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rl_plugins.algorithms import reward_shaping
from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.filtering import resampling_weights
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES
from rl_plugins.algorithms.policy_losses import modifiers as loss_modifiers
from rl_plugins.algorithms.policy_losses.covariance import covariances
from rl_plugins.algorithms.regularization import KL_ESTIMATORS
from rl_plugins.algorithms.rollout_correction import Rejection, diagnostics, importance_weights, rejection_mask
from rl_plugins.algorithms.value_loss import value_loss
from rl_plugins.tests.algorithms.reference import advantages as reference_advantages
from rl_plugins.tests.algorithms.reference import kl as reference_kl
from rl_plugins.tests.algorithms.reference import policy_losses as reference_losses
from rl_plugins.tests.algorithms.reference import reward_shaping as reference_shaping
from rl_plugins.tests.algorithms.reference import rollout_correction as reference_correction
from rl_plugins.tests.algorithms.reference import turns as reference_turns
from rl_plugins.tests.algorithms.reference import value_loss as reference_value
from rl_plugins.tests.algorithms.reference.inputs import Inputs, make_inputs, pick, with_garbage
from rl_plugins.tests.loops import for_each

SEEDS = range(4)
TOLERANCE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
ADVANTAGE_INPUTS = ("token_level_rewards_BT", "response_mask_BT", "groups_B", "valid_B")
LOSS_INPUTS = ("log_probs_BT", "old_log_probs_BT", "advantages_BT")


def tensors(inputs: Inputs) -> dict[str, Any]:
    return {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}


# Advantages ---------------------------------------------------------------------------------------------------------

OPTIMAL = ("old_log_probs_BT", "sum_pi_squared_BT")
ADVANTAGE_CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    *(("grpo", (), {"scale": scale}) for scale in ("group", "batch", "none")),
    *(("grpo_passk", (), {"normalize": normalize}) for normalize in (True, False)),
    *((name, (), {}) for name in ("rloo", "opo", "max_rl", "reinforce_plus_plus_baseline")),
    ("gpg", (), {"norm": 2.5}),
    *(
        ("best_of_n", (), options)
        for options in ({}, {"keep": 2}, {"keep": 2, "above": 0.1}, {"keep": None, "above": 0.0})
    ),
    ("gdpo", (), {}),
    ("gdpo", ("component_rewards_BK",), {}),
    ("gdpo", ("component_rewards_BK",), {"normalize": False}),
    ("gdpo", ("component_rewards_BK",), {"weights": [0.5, 2.0, -1.0]}),
    ("reinforce_plus_plus", (), {}),
    ("reinforce_plus_plus", (), {"gamma": 0.9}),
    ("remax", ("baseline_rewards_B",), {}),
    ("reverse_kl", ("old_log_probs_BT", "teacher_log_probs_BT"), {}),
    ("reverse_kl", ("old_log_probs_BT", "teacher_log_probs_BT"), {"bound": 0.4, "coefficient": 2.0}),
    ("reverse_kl", ("old_log_probs_BT", "teacher_log_probs_BT"), {"bound": None, "reward_weight": 0.5}),
    ("gae", ("values_BT",), {}),
    ("gae", ("values_BT",), {"gamma": 0.95, "lam": 0.8}),
    ("gae", ("values_BT",), {"gamma": 0.95, "lam": 0.8, "normalize": False}),
    *((name, OPTIMAL, {}) for name in ("optimal_token_baseline", "tir_optimal_token_baseline")),
    ("optimal_token_baseline", OPTIMAL, {"zero_tail": False}),
    *((f"{kind}optimal_token_baseline", (*OPTIMAL, "rollout_weights_BT"), {}) for kind in ("", "tir_")),
    *(
        ("gigpo", ("turns_BT", "states_BT"), options)
        for options in ({}, {"gamma": 1.0, "turn_weight": 0.3}, {"scale": "none"}, {"gamma": 0.0})
    ),
    *(("mt_grpo", ("turns_BT",), {"outcome_weight": weight}) for weight in (1.0, 0.4)),
    *(
        ("bilevel_gae", ("values_BT", "turns_BT"), options)
        for options in ({}, {"gamma": 0.9, "lam": 0.8, "turn_gamma": 0.7, "turn_lam": 0.6, "normalize": False})
    ),
]
REFERENCES = {**vars(reference_advantages), **vars(reference_turns)}


@for_each("seed", SEEDS)
@for_each(("name", "extra", "options"), ADVANTAGE_CASES)
def test_advantages_agree_with_the_second_implementation(
    name: str, extra: tuple[str, ...], options: dict[str, Any], seed: int
) -> None:
    inputs: dict[str, Any] = pick(make_inputs(seed, groups_of_one=name != "grpo_passk"), *ADVANTAGE_INPUTS, *extra)
    if name == "max_rl":
        # Defined for rewards of at least 0.
        inputs["token_level_rewards_BT"] = np.abs(inputs["token_level_rewards_BT"])
    expected = REFERENCES[name](**inputs, **options)
    got = ADVANTAGES[name](**tensors(inputs), **options)
    for actual, expected_BT in zip(got, expected, strict=True):
        np.testing.assert_allclose(actual.numpy(), expected_BT, **TOLERANCE)


@for_each("kind", ["power", "extremes", "best"])
def test_resampling_weights_agree_with_the_second_implementation(kind: Any) -> None:
    rewards_B = make_inputs(0)["scores_B"]
    expected = reference_advantages.resampling_weights(rewards_B=rewards_B, kind=kind)
    got = resampling_weights(rewards_B=torch.from_numpy(rewards_B), kind=kind)
    np.testing.assert_allclose(got.numpy(), expected + 1e-8, **TOLERANCE)


# Policy losses ------------------------------------------------------------------------------------------------------

LOSS_CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo_clip", {}),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": None}),
    ("reinforce", {}),
    ("gpg", {}),
    ("cispo", {"clip_low": 0.3, "clip_high": 4.0}),
    ("dro", {"beta": 0.3}),
    ("sapo", {}),
    ("vespo", {}),
    ("vespo", {"k_positive": 0.0, "lambda_positive": 0.1, "k_negative": 1.0, "lambda_negative": 4.0}),
    ("dppo_tv", {}),
    ("dppo_tv", {"low": 0.05, "high": 0.1, "cap": 1.2}),
    ("dppo_kl", {"low": 0.02, "high": 0.05}),
    ("gspo", {}),
    ("gmpo", {}),
    ("clip_cov", {}),
    ("kl_cov", {"coefficient": 0.7}),
]
# The formulas bound no log-ratio there; the functions do, against overflow.
UNBOUNDED = ("clip_cov", "kl_cov", "gmpo", "dro", "gspo")


def loss_inputs(name: str, seed: int, *, extremes: bool) -> dict[str, Any]:
    inputs = with_garbage(make_inputs(seed, extremes=extremes))
    chosen = pick(inputs, *LOSS_INPUTS, *(["selected_BT"] if name.endswith("_cov") else []))
    return {**chosen, "response_mask_BT": inputs["loss_mask_BT"]}


@for_each("seed", SEEDS)
@for_each(("name", "options"), LOSS_CASES)
def test_policy_losses_agree_with_the_second_implementation(name: str, options: dict[str, Any], seed: int) -> None:
    inputs = loss_inputs(name, seed, extremes=name not in UNBOUNDED)
    expected = getattr(reference_losses, name)(**inputs, **options)
    got, _ = POLICY_LOSSES[name](**tensors(inputs), **options)
    mask_BT = inputs["response_mask_BT"]
    np.testing.assert_allclose(np.where(mask_BT, got.numpy(), 0), np.where(mask_BT, expected, 0), **TOLERANCE)


STOP_GRADIENTS = ("cispo", "dppo_tv", "dppo_kl", "gspo", "vespo")


@for_each(("name", "options"), LOSS_CASES)
def test_policy_loss_gradients_agree_with_the_second_implementation(name: str, options: dict[str, Any]) -> None:
    inputs = loss_inputs(name, 1, extremes=False)
    mask_BT = inputs["response_mask_BT"]
    clean = {key: np.where(mask_BT, value, 0.0) if key in LOSS_INPUTS else value for key, value in inputs.items()}
    frozen = {"frozen_log_probs_BT": clean["log_probs_BT"]} if name in STOP_GRADIENTS else {}

    def row_sums(log_probs_BT: NDArray[np.float64]) -> NDArray[np.float64]:
        loss_BT = getattr(reference_losses, name)(**{**clean, "log_probs_BT": log_probs_BT}, **options, **frozen)
        sums_B: NDArray[np.float64] = np.where(mask_BT, loss_BT, 0).sum(axis=1)
        return sums_B

    # A row's losses depend on the same row alone: one difference per column gives the gradient of all rows.
    step = 1e-6
    expected = np.zeros_like(mask_BT, dtype=np.float64)
    for column in range(mask_BT.shape[1]):
        shift = np.zeros_like(expected)
        shift[:, column] = step
        above, below = row_sums(clean["log_probs_BT"] + shift), row_sums(clean["log_probs_BT"] - shift)
        expected[:, column] = (above - below) / (2 * step)
    given = tensors(inputs)
    log_probs_BT = given["log_probs_BT"].requires_grad_()
    loss_BT, _ = POLICY_LOSSES[name](**given, **options)
    torch.where(given["response_mask_BT"].bool(), loss_BT, 0).sum().backward()
    assert log_probs_BT.grad is not None
    np.testing.assert_allclose(log_probs_BT.grad.numpy(), np.where(mask_BT, expected, 0), rtol=1e-5, atol=1e-6)


@for_each("seed", SEEDS)
def test_loss_modifiers_agree_with_the_second_implementation(seed: int) -> None:
    inputs = make_inputs(seed)
    base: dict[str, Any] = {**pick(inputs, *LOSS_INPUTS), "response_mask_BT": inputs["loss_mask_BT"]}
    keep_B = loss_modifiers.off_policy_sequence_mask(**tensors(base), threshold=0.1)
    expected_B = reference_losses.off_policy_sequence_mask(**base, threshold=0.1)
    np.testing.assert_array_equal(keep_B.numpy().astype(bool), expected_B)
    entropy: dict[str, Any] = {"entropy_BT": inputs["entropy_BT"], "response_mask_BT": inputs["loss_mask_BT"]}
    for share in (0.2, 0.5, 1.0):
        top_BT = loss_modifiers.top_entropy_mask(**tensors(entropy), share=share)
        np.testing.assert_array_equal(top_BT.numpy(), reference_losses.top_entropy_mask(**entropy, share=share))
    chosen: dict[str, Any] = {
        **pick(inputs, "log_probs_BT", "is_positive_B"),
        "response_mask_BT": inputs["loss_mask_BT"],
    }
    nll_BT = loss_modifiers.positive_nll(**tensors(chosen))
    np.testing.assert_allclose(nll_BT.numpy(), reference_losses.positive_nll(**chosen), **TOLERANCE)
    covariance_inputs: dict[str, Any] = {
        **pick(inputs, "log_probs_BT", "advantages_BT"),
        "response_mask_BT": inputs["loss_mask_BT"],
    }
    got_BT = covariances(**tensors(covariance_inputs))
    expected_BT = reference_losses.covariances(**covariance_inputs)
    mask_BT = inputs["loss_mask_BT"]
    np.testing.assert_allclose(np.where(mask_BT, got_BT.numpy(), 0), np.where(mask_BT, expected_BT, 0), **TOLERANCE)


# KL, values, correction, shaping ------------------------------------------------------------------------------------


@for_each("seed", SEEDS)
@for_each("name", list(KL_ESTIMATORS))
def test_kl_estimators_agree_with_the_second_implementation(name: str, seed: int) -> None:
    inputs: dict[str, Any] = pick(make_inputs(seed), "log_probs_BT", "ref_log_probs_BT", "response_mask_BT")
    expected = reference_kl.kl(name=name, **inputs)
    given = tensors(inputs)
    got = KL_ESTIMATORS[name](given["log_probs_BT"], given["ref_log_probs_BT"])
    mask_BT = inputs["response_mask_BT"]
    np.testing.assert_allclose(np.where(mask_BT, got.numpy(), 0), np.where(mask_BT, expected, 0), **TOLERANCE)


@for_each("seed", SEEDS)
@for_each("clip", [0.5, 0.1, None])
def test_value_loss_agrees_with_the_second_implementation(clip: float | None, seed: int) -> None:
    inputs: dict[str, Any] = pick(make_inputs(seed), "values_BT", "old_values_BT", "returns_BT", "response_mask_BT")
    got, _ = value_loss(**tensors(inputs), clip=clip)
    mask_BT = inputs["response_mask_BT"]
    expected = reference_value.value_loss(**inputs, clip=clip)
    np.testing.assert_allclose(np.where(mask_BT, got.numpy(), 0), np.where(mask_BT, expected, 0), **TOLERANCE)


def correction_inputs(seed: int, *, extremes: bool) -> dict[str, Any]:
    inputs = with_garbage(make_inputs(seed, extremes=extremes))
    return {**pick(inputs, "log_probs_BT", "rollout_log_probs_BT"), "response_mask_BT": inputs["loss_mask_BT"]}


@for_each("seed", SEEDS)
@for_each("level", ["token", "sequence"])
@for_each("options", [{}, {"cap": 2.0}, {"band": (0.5, 5.0)}, {"cap": 1.5, "normalize": True}])
def test_importance_weights_agree_with_the_second_implementation(
    level: Any, options: dict[str, Any], seed: int
) -> None:
    inputs = correction_inputs(seed, extremes=True)
    expected = reference_correction.importance_weights(**inputs, level=level, **options)
    got = importance_weights(**tensors(inputs), level=level, **options)
    np.testing.assert_allclose(got.numpy(), expected, **TOLERANCE)


K1 = [("token_k1", 1.5), ("seq_sum_k1", 2.0), ("seq_mean_k1", 1.2)]
K23 = [
    (f"{level}_{k}", threshold)
    for level, threshold in (("token", 0.05), ("seq_sum", 0.5), ("seq_mean", 0.05), ("seq_max", 0.3))
    for k in ("k2", "k3")
]


@for_each("seed", SEEDS)
@for_each(("mode", "threshold"), [*K1, *K23])
def test_rejection_mask_agrees_with_the_second_implementation(mode: Any, threshold: float, seed: int) -> None:
    inputs = correction_inputs(seed, extremes=True)
    expected = reference_correction.rejection_mask(**inputs, rules=[reference_correction.Rejection(mode, threshold)])
    got = rejection_mask(**tensors(inputs), rules=[Rejection(mode, threshold)])
    np.testing.assert_array_equal(got.numpy(), expected)


@for_each("seed", SEEDS)
def test_rejection_mask_of_chained_rules_agrees_with_the_second_implementation(seed: int) -> None:
    inputs = correction_inputs(seed, extremes=True)
    reference_rules = (
        reference_correction.Rejection("token_k1", None, 0.8, 1.5),
        reference_correction.Rejection("seq_max_k2", 2.0),
    )
    expected = reference_correction.rejection_mask(**inputs, rules=reference_rules)
    rules = [Rejection("token_k1", (0.8, 1.5)), Rejection("seq_max_k2", 2.0)]
    np.testing.assert_array_equal(rejection_mask(**tensors(inputs), rules=rules).numpy(), expected)


@for_each("seed", SEEDS)
def test_diagnostics_agree_with_the_second_implementation(seed: int) -> None:
    inputs = correction_inputs(seed, extremes=False)
    weights_BT = reference_correction.importance_weights(**inputs, cap=2.0)
    expected = reference_correction.diagnostics(**inputs, weights_BT=weights_BT)
    expected["log_ppl_abs_difference"] = expected.pop("log_ppl_absolute_difference")
    got = diagnostics(**tensors(inputs), weights_BT=torch.from_numpy(weights_BT))
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_reward_shaping_agrees_with_the_second_implementation() -> None:
    inputs = make_inputs(3)
    lengths_B, rewards_B = inputs["response_lengths_B"], inputs["scores_B"]
    options: dict[str, Any] = {"max_tokens": 12, "buffer_tokens": 5, "factor": 0.7}
    got = reward_shaping.overlong_penalty(response_lengths_B=torch.from_numpy(lengths_B), **options)
    expected = reference_shaping.overlong_penalty(response_lengths_B=lengths_B, **options)
    # Lengths are whole numbers, so the penalties are float32.
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)
    clipped = reward_shaping.clip_rewards(rewards_B=torch.from_numpy(rewards_B), low=-0.5, high=1.0)
    expected = reference_shaping.clip_rewards(rewards_B=rewards_B, low=-0.5, high=1.0)
    np.testing.assert_array_equal(clipped.numpy(), expected)
