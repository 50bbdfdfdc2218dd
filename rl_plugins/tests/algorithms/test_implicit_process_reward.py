"""PRIME's functions: against a second implementation, by hand, and over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.implicit_process_reward import (
    best_of_n_weights,
    normalized,
    opponents,
    outcome_cross_entropy,
    outcome_preference,
    process_returns,
    process_rewards,
)
from rl_plugins.tests.algorithms.reference import process_rewards as reference
from rl_plugins.tests.algorithms.reference.inputs import Inputs, make_inputs, pick, with_garbage
from rl_plugins.tests.algorithms.simulated_ranks import run_with_all_gather
from rl_plugins.tests.loops import for_each

SEEDS = range(4)
TOLERANCE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def tensors(inputs: Inputs) -> dict[str, Any]:
    return {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}


def two_models(seed: int, *, garbage: bool = False) -> Inputs:
    inputs = make_inputs(seed, extremes=False)
    inputs = with_garbage(inputs) if garbage else inputs
    return {
        "log_probs_BT": inputs["log_probs_BT"],
        "reference_log_probs_BT": inputs["ref_log_probs_BT"],
        "response_mask_BT": inputs["loss_mask_BT"],
    }


def outcomes(seed: int, *, soft: bool = False) -> Inputs:
    """Outcomes of all kinds of groups: mixed, all successes, all failures, alone, in part or all invalid."""
    inputs = make_inputs(seed)
    rng = np.random.default_rng(100 + seed)
    outcomes_B = rng.choice([0.0, 0.25, 0.5, 1.0] if soft else [0.0, 1.0], size=len(inputs["groups_B"]))
    outcomes_B[inputs["groups_B"] == 8] = 1.0
    outcomes_B[inputs["groups_B"] == 0] = 0.0
    return {"outcomes_B": outcomes_B, **pick(inputs, "groups_B", "valid_B")}


# The advantage ------------------------------------------------------------------------------------------------------


@for_each("seed", SEEDS)
@for_each("options", [{}, {"outcome_coefficient": 0.5, "process_coefficient": 2.0}])
def test_prime_advantages_agree_with_the_second_implementation(options: dict[str, Any], seed: int) -> None:
    inputs: dict[str, Any] = {
        **pick(make_inputs(seed), "token_level_rewards_BT", "response_mask_BT", "groups_B", "valid_B"),
        "process_rewards_BT": np.random.default_rng(seed).normal(size=make_inputs(seed)["values_BT"].shape),
    }
    expected = reference.prime(**inputs, **options)
    for actual, expected_BT in zip(ADVANTAGES["prime"](**tensors(inputs), **options), expected, strict=True):
        np.testing.assert_allclose(actual.numpy(), expected_BT, **TOLERANCE)


def test_prime_advantages_match_a_computation_by_hand() -> None:
    """Two samples: each source minus the other sample's; of the first, two tokens around an observation."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    process = torch.tensor([[0.5, torch.nan, 0.3], [0.1, 0.1, torch.nan]])
    _, returns = ADVANTAGES["prime"](
        token_level_rewards_BT=rewards,
        response_mask_BT=mask,
        groups_B=torch.tensor([4, 4]),
        valid_B=torch.tensor([True, True]),
        process_rewards_BT=process,
        outcome_coefficient=10.0,
        process_coefficient=1.0,
    )
    # Baselines: 0.4 + 0.1 for process rewards, and the rewards themselves count twice.
    first = [2 * 0.5 - 0.5, 2 * 0.3 - 0.5 + 10 * (1 - 0)]
    second = [2 * 0.1 - 0.5, 2 * 0.1 - 0.5 + 10 * (0 - 1)]
    expected = torch.tensor([[sum(first), 0.0, first[1]], [sum(second), second[1], 0.0]])
    torch.testing.assert_close(returns, expected)


def test_prime_without_process_rewards_returns_rloo() -> None:
    inputs = tensors(pick(make_inputs(1), "token_level_rewards_BT", "response_mask_BT", "groups_B", "valid_B"))
    noise = torch.randn(inputs["response_mask_BT"].shape, generator=torch.Generator().manual_seed(0))
    _, returns = ADVANTAGES["prime"](
        **inputs, process_rewards_BT=noise, outcome_coefficient=1.0, process_coefficient=0.0
    )
    torch.testing.assert_close(returns, ADVANTAGES["rloo"](**inputs)[0], **TOLERANCE)


@for_each("option", ["outcome_coefficient", "process_coefficient"])
def test_prime_refuses_a_negative_coefficient(option: str) -> None:
    inputs = tensors(pick(make_inputs(1), "token_level_rewards_BT", "response_mask_BT", "groups_B", "valid_B"))
    with pytest.raises(ValueError, match=rf"{option}=-1: must be 0 or more"):
        ADVANTAGES["prime"](**inputs, process_rewards_BT=inputs["response_mask_BT"], **{option: -1})


# Rewards ------------------------------------------------------------------------------------------------------------

REWARD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"beta": 0.5, "lam": 0.9},
    {"lam": 1.0},
    {"granularity": "whole"},
    {"granularity": "whole", "lam": 0.5},
]


@for_each("seed", SEEDS)
@for_each("with_outcomes", [False, True])
@for_each("options", REWARD_OPTIONS)
def test_process_rewards_agree_with_the_second_implementation(
    options: dict[str, Any], with_outcomes: bool, seed: int
) -> None:
    inputs = two_models(seed)
    if with_outcomes:
        inputs["outcomes_B"] = outcomes(seed)["outcomes_B"]
    expected = reference.process_rewards(**inputs, **options)  # type: ignore[arg-type]
    assert expected.any()
    dirty = {**inputs, **two_models(seed, garbage=True)}
    for given in (inputs, dirty):
        np.testing.assert_allclose(process_rewards(**tensors(given), **options).numpy(), expected, **TOLERANCE)


def test_process_rewards_with_an_outcome_sum_to_the_outcome() -> None:
    mask, zeros = torch.ones(1, 4), torch.zeros(1, 4)
    log_probs = torch.tensor([[1.0, -2.0, 0.5, 7.0]])
    given: dict[str, Any] = {"log_probs_BT": log_probs, "reference_log_probs_BT": zeros, "response_mask_BT": mask}
    whole = process_rewards(**given, outcomes_B=torch.ones(1), granularity="whole", beta=0.1)
    torch.testing.assert_close(whole, torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
    # With lam 1, each token but the last has the remainder of the outcome after the earlier tokens.
    spread = process_rewards(**given, outcomes_B=torch.ones(1), lam=1.0, beta=0.1)
    torch.testing.assert_close(spread, torch.tensor([[1.0, 0.9, 1.1, 0.0]]))


@for_each(
    ("options", "message"),
    [
        ({"granularity": "step"}, "granularity='step': use one of token, whole"),
        ({"beta": 0.0}, r"beta=0\.0: must be above 0"),
        ({"lam": 1.5}, r"lam=1\.5: must be between 0 and 1"),
    ],
)
def test_process_rewards_refuse_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        process_rewards(**tensors(two_models(0)), **options)


def one_rank(values: Tensor) -> Tensor:
    return values


@for_each("seed", SEEDS)
def test_normalized_agrees_with_the_second_implementation(seed: int) -> None:
    inputs = make_inputs(seed)
    given = {"process_rewards_BT": inputs["values_BT"], "response_mask_BT": inputs["loss_mask_BT"]}
    expected = reference.normalized(**given)
    dirty = {**given, "process_rewards_BT": with_garbage(inputs)["values_BT"]}
    for one in (given, dirty):
        got = normalized(**tensors(one), max_over_ranks=one_rank)
        np.testing.assert_allclose(got.numpy(), expected, **TOLERANCE)


def test_normalized_on_two_ranks_equals_normalized_on_one_rank() -> None:
    inputs = tensors(make_inputs(2))
    rewards, mask = inputs["values_BT"], inputs["loss_mask_BT"]
    together = normalized(process_rewards_BT=rewards, response_mask_BT=mask, max_over_ranks=one_rank)
    for rows_of_rank_0 in (range(0), range(5), range(len(mask))):
        rows = [list(rows_of_rank_0), [row for row in range(len(mask)) if row not in rows_of_rank_0]]

        def on_rank(rank: int, all_gather: Any, rows: list[list[int]] = rows) -> Tensor:
            return normalized(
                process_rewards_BT=rewards[rows[rank]],
                response_mask_BT=mask[rows[rank]],
                max_over_ranks=lambda values: torch.stack(all_gather(values)).amax(dim=0),
            )

        for rank, part in enumerate(run_with_all_gather(2, on_rank)):
            assert torch.equal(part, together[rows[rank]])


# Training -----------------------------------------------------------------------------------------------------------


@for_each("seed", SEEDS)
@for_each("soft", [False, True])
def test_outcome_cross_entropy_and_gradient_agree_with_the_second_implementation(soft: bool, seed: int) -> None:
    inputs, outcomes_B = two_models(seed, garbage=True), outcomes(seed, soft=soft)["outcomes_B"]
    mask_BT = inputs["response_mask_BT"]
    expected_B = reference.process_returns(**inputs, beta=0.3)
    given = tensors(inputs)
    log_probs_BT = given["log_probs_BT"].requires_grad_()
    returns_B = process_returns(**given, beta=0.3)
    np.testing.assert_allclose(returns_B.detach().numpy(), expected_B, **TOLERANCE)
    losses_B = outcome_cross_entropy(returns_B=returns_B, outcomes_B=torch.from_numpy(outcomes_B))
    expected = reference.outcome_cross_entropy(returns_B=expected_B, outcomes_B=outcomes_B)
    np.testing.assert_allclose(losses_B.detach().numpy(), expected, **TOLERANCE)
    # d/dz of the cross-entropy is sigmoid(z) - y; each sampled token moves z by beta.
    (gradient_BT,) = torch.autograd.grad(losses_B.sum(), log_probs_BT)
    slopes_B = 1 / (1 + np.exp(-expected_B)) - outcomes_B
    np.testing.assert_allclose(gradient_BT.numpy(), 0.3 * slopes_B[:, None] * mask_BT, **TOLERANCE)


@for_each("seed", SEEDS)
@for_each("soft", [False, True])
@for_each("best_of_n", [None, "outcome", "return"])
def test_outcome_preference_and_gradient_agree_with_the_second_implementation(
    best_of_n: str | None, soft: bool, seed: int
) -> None:
    given = outcomes(seed, soft=soft)
    valid_B = given["valid_B"]
    returns_B = np.random.default_rng(seed).normal(size=len(valid_B))
    expected_B = reference.outcome_preference(returns_B=returns_B, best_of_n=best_of_n, **given)
    # The values of an invalid sample must not matter.
    dirty = {**given, "outcomes_B": np.where(valid_B, given["outcomes_B"], np.nan)}
    mine_B = torch.from_numpy(np.where(valid_B, returns_B, np.nan)).requires_grad_()
    groups = {name: torch.from_numpy(given[name]) for name in ("groups_B", "valid_B")}
    outcomes_B = torch.from_numpy(dirty["outcomes_B"])
    opponents_B = opponents(returns_B=mine_B, outcomes_B=outcomes_B, **groups)
    weights_B = None
    if best_of_n is not None:
        weights_B = best_of_n_weights(values_B=outcomes_B if best_of_n == "outcome" else mine_B, **groups)
        assert not weights_B.requires_grad and (weights_B[~groups["valid_B"]] == 0).all()
    assert not opponents_B.requires_grad
    losses_B = outcome_preference(returns_B=mine_B, outcomes_B=outcomes_B, opponents_B=opponents_B, weights_B=weights_B)
    np.testing.assert_allclose(losses_B.detach().numpy()[valid_B], expected_B[valid_B], **TOLERANCE)
    # -log sigmoid(s (z - o)) falls by s sigmoid(-s (z - o)), while the opponents are constants.
    (gradient_B,) = torch.autograd.grad(losses_B[groups["valid_B"]].sum(), mine_B)
    signs_B = np.where(given["outcomes_B"] > 0, 1.0, -1.0)
    slopes_B = -signs_B / (1 + np.exp(signs_B * (returns_B - opponents_B.numpy())))
    if weights_B is not None:
        slopes_B = slopes_B * weights_B.numpy()
    np.testing.assert_allclose(gradient_B.numpy()[valid_B], slopes_B[valid_B], **TOLERANCE)


def test_best_of_n_weights_match_a_computation_by_hand() -> None:
    weights = best_of_n_weights(
        values_B=torch.tensor([0.0, 1.0, 5.0, 5.0, 9.0]),
        groups_B=torch.tensor([3, 3, 8, 8, 1]),
        valid_B=torch.tensor([True, True, True, True, False]),
    )
    # The worse of two is the best of two draws (with replacement) half as often as drawn; equals are both best.
    assert weights.tolist() == [1.0, 2.0, 2.0, 2.0, 0.0]


def test_outcome_losses_of_extreme_returns_are_finite_in_float32() -> None:
    returns_B = torch.tensor([500.0, -500.0], requires_grad=True)
    wrong_B = torch.tensor([0.0, 1.0])
    zeros_B = torch.zeros(2)
    for losses_B in (
        outcome_cross_entropy(returns_B=returns_B, outcomes_B=wrong_B),
        outcome_preference(returns_B=returns_B, outcomes_B=wrong_B, opponents_B=zeros_B),
    ):
        assert losses_B.tolist() == [500.0, 500.0]
        (gradient_B,) = torch.autograd.grad(losses_B.sum(), returns_B)
        assert gradient_B.tolist() == [1.0, -1.0]
