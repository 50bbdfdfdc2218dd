"""The optimal token baseline by hand, against plain loops, and its purpose: less variance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.returns import optimal_token_baseline, tir_optimal_token_baseline
from rl_plugins.tests.algorithms.advantage_cases import Inputs, make_inputs
from rl_plugins.tests.loops import for_each

ESTIMATORS = (optimal_token_baseline, tir_optimal_token_baseline)


def inputs_of(rewards: Any, mask: Any, energies: Any) -> Inputs:
    """One group. The probability of every token is 1/2: the squared norm equals `energies`."""
    mask = torch.tensor(mask).double()
    return {
        "token_level_rewards_BT": torch.tensor(rewards).double(),
        "response_mask_BT": mask,
        "groups_B": torch.zeros(len(mask), dtype=torch.long),
        "valid_B": torch.ones(len(mask), dtype=torch.bool),
        "old_log_probs_BT": torch.full_like(mask, 0.5).log(),
        "sum_pi_squared_BT": torch.tensor(energies).double(),
    }


def in_loops(inputs: Inputs, compact: bool, zero_tail: bool) -> Tensor:
    """Advantages by the formula, a token at a time."""
    mask, valid, groups = inputs["response_mask_BT"], inputs["valid_B"], inputs["groups_B"]
    advantages = torch.zeros_like(mask)
    rows: dict[int, dict[int, tuple[float, float, int]]] = {}  # sample -> position -> return, energy, column
    for i in range(len(mask)):
        tokens = mask[i].nonzero().flatten().tolist() if valid[i] else []
        rows[i], energy = {}, 0.0
        for n, t in enumerate(tokens):
            norm = float(1 - 2 * inputs["old_log_probs_BT"][i, t].exp() + inputs["sum_pi_squared_BT"][i, t])
            if "rollout_weights_BT" in inputs:
                norm *= float(inputs["rollout_weights_BT"][i, t]) ** 2
            energy += norm
            to_go = float(sum(inputs["token_level_rewards_BT"][i, s] for s in tokens[n:]))
            rows[i][n if compact else t] = (to_go, energy, t)
    for i in rows:
        siblings = [j for j in rows if groups[j] == groups[i] and valid[j]]
        longest_of_others = max((len(rows[j]) for j in siblings if j != i), default=0)
        for position, (to_go, _, column) in rows[i].items():
            here = [rows[j][position] for j in siblings if position in rows[j]]
            baseline = sum(g * w for g, w, _ in here) / (sum(w for _, w, _ in here) + 1e-8)
            in_tail = zero_tail and len(rows[i]) > longest_of_others and position >= longest_of_others
            members = [j for j in siblings if rows[j] or not compact]
            advantages[i, column] = to_go - (0.0 if in_tail or len(members) == 1 else baseline)
    return advantages


@for_each("zero_tail", [True, False])
@for_each("compact", [True, False])
@for_each("weighted", [True, False])
@for_each("seed", range(5))
def test_optimal_token_baselines_agree_with_plain_loops(
    seed: int, weighted: bool, compact: bool, zero_tail: bool
) -> None:
    inputs = make_inputs("tir_optimal_token_baseline", seed)
    if not weighted:
        del inputs["rollout_weights_BT"]
    advantages, _ = ESTIMATORS[compact](**inputs, zero_tail=zero_tail)
    torch.testing.assert_close(advantages, in_loops(inputs, compact, zero_tail), rtol=1e-8, atol=1e-8)


@for_each("estimator", ESTIMATORS)
def test_optimal_token_baselines_match_a_computation_by_hand(estimator: Any) -> None:
    """Norms 1, 1, 1 and 3, 1; energies 1, 2, 3 and 3, 4; returns 4, 4, 4 and 8, 8."""
    inputs = inputs_of(
        rewards=[[0.0, 0.0, 4.0], [0.0, 8.0, 0.0]],
        mask=[[1, 1, 1], [1, 1, 0]],
        energies=[[1.0, 1.0, 1.0], [3.0, 1.0, 9.0]],
    )
    # Baselines (1 * 4 + 3 * 8) / 4 = 7, (2 * 4 + 4 * 8) / 6 = 20/3, and 4 in the tail.
    expected = torch.tensor([[4 - 7, 4 - 20 / 3, 4.0], [8 - 7, 8 - 20 / 3, 0]]).double()
    advantages, returns = estimator(**inputs)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)
    assert returns.tolist() == [[4, 4, 4], [8, 8, 0]]
    # The response is its own baseline in the tail.
    expected[0, 2] = 0
    torch.testing.assert_close(estimator(**inputs, zero_tail=False)[0], expected, rtol=1e-6, atol=1e-6)


def test_optimal_token_baseline_squares_rollout_weights() -> None:
    inputs = inputs_of(rewards=[[4.0], [8.0]], mask=[[1], [1]], energies=[[1.0], [1.0]])
    inputs["rollout_weights_BT"] = torch.tensor([[1.0], [3.0]]).double()
    advantages, _ = optimal_token_baseline(**inputs)
    baseline = (4 + 9 * 8) / 10
    assert advantages[:, 0].tolist() == pytest.approx([4 - baseline, 8 - baseline])


def test_tir_optimal_token_baseline_aligns_sampled_tokens_by_number() -> None:
    """An observation in one of two equal responses: only the count of sampled tokens aligns the two."""
    rewards, energies = [[0.0, 0.0, 4.0], [0.0, 8.0, 0.0]], [[1.0, 5.0, 1.0], [1.0, 1.0, 1.0]]
    inputs = inputs_of(rewards=rewards, mask=[[1, 0, 1], [1, 1, 0]], energies=energies)
    advantages, _ = tir_optimal_token_baseline(**inputs)
    # Energies 1, 2 in both: baseline 6 at both tokens.
    torch.testing.assert_close(advantages, torch.tensor([[-2.0, 0, -2], [2, 2, 0]]).double(), rtol=1e-6, atol=1e-6)


@for_each("zero_tail", [True, False])
def test_optimal_token_baselines_agree_on_responses_without_observations(zero_tail: bool) -> None:
    inputs = make_inputs("tir_optimal_token_baseline", 4)
    width = inputs["response_mask_BT"].shape[1]
    lengths_B1 = 1 + torch.arange(len(inputs["response_mask_BT"]))[:, None] % width
    inputs["response_mask_BT"] = (torch.arange(width) < lengths_B1).double()
    plain = optimal_token_baseline(**inputs, zero_tail=zero_tail)
    tir = tir_optimal_token_baseline(**inputs, zero_tail=zero_tail)
    torch.testing.assert_close(tir, plain, rtol=1e-10, atol=1e-10)


@for_each("zero_tail", [True, False])
def test_tir_optimal_token_baseline_beside_empty_siblings_keeps_the_returns(zero_tail: bool) -> None:
    inputs = inputs_of(rewards=[[0.0, 4.0], [8.0, 0.0]], mask=[[1, 1], [0, 0]], energies=[[1.0, 1.0], [1.0, 1.0]])
    advantages, _ = tir_optimal_token_baseline(**inputs, zero_tail=zero_tail)
    assert advantages.tolist() == [[4, 4], [0, 0]]


def test_tir_optimal_token_baseline_has_less_variance_than_the_group_mean() -> None:
    """Responses of 1 to 6 tokens of one policy, with a reward that grows with the length: gradients of the logits."""
    groups, siblings, width, vocabulary = 4000, 4, 6, 3
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([1.0, 0.0, -0.5]).double()
    probabilities = logits.softmax(dim=-1)
    samples = groups * siblings
    tokens_BT = torch.multinomial(probabilities, samples * width, replacement=True, generator=generator)
    tokens_BT = tokens_BT.view(samples, width)
    # Token 2 ends a response.
    ended_BT = (tokens_BT == 2).long().cumsum(dim=-1) - (tokens_BT == 2).long() > 0
    mask_BT = (~ended_BT).double()
    rewards_B = (mask_BT * (tokens_BT == 0)).sum(dim=-1)
    last_BT = torch.arange(width) == mask_BT.sum(dim=-1, keepdim=True) - 1
    inputs: Inputs = {
        "token_level_rewards_BT": torch.where(last_BT, rewards_B[:, None], 0),
        "response_mask_BT": mask_BT,
        "groups_B": torch.arange(samples) // siblings,
        "valid_B": torch.ones(samples, dtype=torch.bool),
        "old_log_probs_BT": probabilities[tokens_BT].log(),
        "sum_pi_squared_BT": torch.full((samples, width), float(probabilities.square().sum())).double(),
    }
    scores_BTV = torch.nn.functional.one_hot(tokens_BT, vocabulary) - probabilities

    def variance(advantages_BT: Tensor) -> float:
        """Compute the variance of the gradient of a group."""
        gradients_BV = (advantages_BT * mask_BT).unsqueeze(-1).mul(scores_BTV).sum(dim=1)
        return float(gradients_BV.view(groups, siblings, vocabulary).mean(dim=1).var(dim=0).sum())

    group_mean_B = rewards_B.view(groups, siblings).mean(dim=1).repeat_interleave(siblings)
    optimal, _ = tir_optimal_token_baseline(**inputs)
    assert variance(optimal) < variance((rewards_B - group_mean_B)[:, None].expand(samples, width))


@for_each("estimator", ESTIMATORS)
def test_optimal_token_baselines_stay_bounded_for_tokens_of_probability_1(estimator: Any) -> None:
    """Probabilities of 1 have a norm of 0, give or take a rounding error of either sign."""
    inputs = inputs_of(
        rewards=[[4.0], [8.0], [0.0]], mask=[[1]] * 3, energies=[[1e-7], [-0.999e-7], [0.0]]
    )  # Plus 1 - 2 pi = 0.
    advantages, _ = estimator(**inputs)
    assert (advantages.abs() <= 8).all()


def test_optimal_token_baseline_minimizes_the_weighted_gradient_norm() -> None:
    """`sum_i W (g - B)^2` over the group has its least value at the optimal baseline, at every position."""
    generator = torch.Generator().manual_seed(0)
    energies = torch.rand(6, 4, generator=generator).double() + 0.1
    rewards = torch.zeros(6, 4).double()
    rewards[:, -1] = torch.randn(6, generator=generator).double()
    inputs = inputs_of(rewards.tolist(), [[1] * 4] * 6, energies.tolist())
    advantages, returns = optimal_token_baseline(**inputs)
    weight = energies.cumsum(dim=-1)
    best = (weight * advantages.square()).sum(dim=0)
    for shift in (-0.1, 0.1):
        assert ((weight * (advantages + shift).square()).sum(dim=0) > best).all()
    group_mean = returns - returns.mean(dim=0)
    assert ((weight * group_mean.square()).sum(dim=0) > best).all()
