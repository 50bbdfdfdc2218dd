"""GiGPO, MT-GRPO and bi-level GAE against examples computed by hand, and against the estimators of whole responses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.tests.algorithms.advantage_cases import make_inputs

# Two samples of one group; position 2 is an observation between two turns of two tokens and one token.
MASK = torch.tensor([[1.0, 1, 0, 1], [1, 1, 0, 1]], dtype=torch.float64)
TURNS = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])


def estimate(name: str, rewards: list[list[float]], **options: Any) -> tuple[Tensor, Tensor]:
    return ADVANTAGES[name](
        token_level_rewards_BT=torch.tensor(rewards, dtype=torch.float64),
        response_mask_BT=MASK,
        groups_B=torch.zeros(2, dtype=torch.long),
        valid_B=torch.ones(2, dtype=torch.bool),
        turns_BT=TURNS,
        **options,
    )


def test_gigpo_adds_the_comparison_of_returns_from_the_same_state() -> None:
    states = torch.tensor([[5, 5, 6, 6], [5, 5, 7, 7]])
    options = {"scale": "none", "gamma": 0.5, "turn_weight": 10.0}
    advantages, _ = estimate("gigpo", [[0, 1, 0, 2], [0, 0, 0, 1]], states_BT=states, **options)
    # Responses: 3 and 1. Returns from state 5: 1 + 0.5 * 2 = 2 and 0.5. States 6 and 7 have one turn each.
    assert advantages.tolist() == [[1 + 7.5, 1 + 7.5, 0, 1], [-1 - 7.5, -1 - 7.5, 0, -1]]


def test_gigpo_compares_turns_of_one_sample_that_return_to_a_state() -> None:
    states = torch.tensor([[5, 5, 5, 5], [6, 6, 7, 7]])
    advantages, _ = estimate("gigpo", [[0, 1, 0, 2], [0, 1, 0, 2]], states_BT=states, scale="none", gamma=1.0)
    assert advantages.tolist() == [[0.5, 0.5, 0, -0.5], [0, 0, 0, 0]]


def test_gigpo_without_weight_of_turns_is_grpo() -> None:
    inputs = make_inputs("gigpo", 1)
    plain = {name: tensor for name, tensor in inputs.items() if name not in ("turns_BT", "states_BT")}
    assert torch.equal(ADVANTAGES["gigpo"](**inputs, turn_weight=0.0)[0], ADVANTAGES["grpo"](**plain)[0])


def test_mt_grpo_compares_turn_rewards_and_outcomes() -> None:
    advantages, _ = estimate("mt_grpo", [[0, 3, 0, 4], [0, 1, 0, 8]], outcome_weight=0.5, eps=0.0)
    half = 0.5**0.5
    # Rewards of the first turn: 3 and 1. Outcomes: 4 and 8. Each is sqrt(1/2) deviations from the mean.
    expected = [[half - 0.5 * half, half - 0.5 * half, 0, -half], [-half + 0.5 * half, -half + 0.5 * half, 0, half]]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))


def test_mt_grpo_of_single_turns_is_grpo() -> None:
    inputs = make_inputs("mt_grpo", 2) | {"turns_BT": torch.zeros_like(make_inputs("mt_grpo", 2)["turns_BT"])}
    plain = {name: tensor for name, tensor in inputs.items() if name != "turns_BT"}
    torch.testing.assert_close(ADVANTAGES["mt_grpo"](**inputs)[0], ADVANTAGES["grpo"](**plain)[0])


def test_bilevel_gae_discounts_turns_and_tokens() -> None:
    values = torch.tensor([[1.0, 2, 9, 4], [0, 0, 0, 0]], dtype=torch.float64)
    options = {"gamma": 0.5, "lam": 1.0, "turn_gamma": 0.25, "turn_lam": 1.0, "normalize": False}
    gains, returns = estimate("bilevel_gae", [[1, 3, 50, 8], [0, 0, 0, 0]], values_BT=values, **options)
    # Last turn: 8 - 4. First turn, last token: 3 + 0.25 * 4 - 2 + 0.25 * 4. First token: 1 + 0.5 * 2 - 1 + 0.5 * 3.
    assert gains[0].tolist() == [2.5, 3, 0, 4] and returns[0].tolist() == [3.5, 5, 0, 8]


@pytest.mark.parametrize("normalize", [True, False])
def test_bilevel_gae_of_single_turns_is_gae(normalize: bool) -> None:
    inputs = make_inputs("bilevel_gae", 3)
    turns = inputs.pop("turns_BT")
    options = {"gamma": 0.9, "lam": 0.8, "normalize": normalize}
    one_turn = ADVANTAGES["bilevel_gae"](**inputs, turns_BT=torch.zeros_like(turns), turn_gamma=0.1, **options)
    for found, expected in zip(one_turn, ADVANTAGES["gae"](**inputs, **options), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
