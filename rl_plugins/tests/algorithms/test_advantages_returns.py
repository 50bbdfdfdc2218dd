"""Returns, GAE and their whitening against examples computed by hand, and GAE against its definition as a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.inputs import one_rank
from rl_plugins.algorithms.masked import whiten
from rl_plugins.tests.algorithms.advantage_cases import make_inputs
from rl_plugins.tests.loops import for_each


def estimate(name: str, rewards: Any, mask: Any, **options: Any) -> tuple[Tensor, Tensor]:
    count = len(rewards)
    return ADVANTAGES[name](
        token_level_rewards_BT=torch.tensor(rewards).double(),
        response_mask_BT=torch.tensor(mask).double(),
        groups_B=torch.zeros(count, dtype=torch.long),
        valid_B=torch.ones(count, dtype=torch.bool),
        **options,
    )


def test_reinforce_plus_plus_discounts_over_sampled_tokens_only() -> None:
    """The third position is an observation: its reward does not count, and the position is no step in time."""
    rewards, mask = [[1.0, 2.0, 50.0, 4.0, 60.0]], [[1, 1, 0, 1, 0]]
    advantages, returns = estimate("reinforce_plus_plus", rewards, mask, gamma=0.5)
    assert returns.tolist() == [[1 + 0.5 * 4, 2 + 0.5 * 4, 0, 4, 0]]  # 3, 4, 4: mean 11/3, unbiased variance 1/3.
    expected = torch.tensor([[-2 / 3, 1 / 3, 0, 1 / 3, 0]]).double() * 3**0.5
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


def test_reinforce_plus_plus_without_discount_returns_the_rewards_to_go() -> None:
    _, returns = estimate("reinforce_plus_plus", [[1.0, 2.0, 50.0, 4.0]], [[1, 1, 0, 1]])
    assert returns.tolist() == [[7, 6, 0, 4]]


def test_reinforce_plus_plus_baseline_centres_by_group_and_scales_by_batch() -> None:
    advantages, _ = ADVANTAGES["reinforce_plus_plus_baseline"](
        token_level_rewards_BT=torch.tensor([[1.0], [3.0], [10.0], [30.0]]).double(),
        response_mask_BT=torch.ones(4, 1).double(),
        groups_B=torch.tensor([0, 0, 1, 1]),
        valid_B=torch.ones(4, dtype=torch.bool),
    )
    # Centred: -1, 1, -10, 10, variance 202 / 3.
    expected = torch.tensor([-1.0, 1, -10, 10]).double() / (202 / 3) ** 0.5
    torch.testing.assert_close(advantages[:, 0], expected, rtol=1e-6, atol=1e-6)


def test_remax_subtracts_the_reward_of_the_greedy_response() -> None:
    advantages, returns = estimate(
        "remax",
        [[0.5, 9.0, 2.0], [1.0, 7.0, 7.0]],
        [[1, 0, 1], [1, 0, 0]],
        baseline_rewards_B=torch.tensor([1.0, 3.0]).double(),
    )
    assert returns.tolist() == [[2.5, 0, 2], [1, 0, 0]]
    assert advantages.tolist() == [[1.5, 0, 1], [-2, 0, 0]]


def test_gae_matches_a_computation_by_hand() -> None:
    """gamma = lam = 1/2, so gamma lam = 1/4; the observation in the middle is skipped."""
    values = torch.tensor([[1.0, 2.0, 99.0, 4.0, 99.0]]).double()
    rewards, mask = [[0.0, 1.0, 99.0, 8.0, 99.0]], [[1, 1, 0, 1, 0]]
    advantages, returns = estimate("gae", rewards, mask, values_BT=values, gamma=0.5, lam=0.5)
    last = 8 - 4
    middle = (1 + 0.5 * 4 - 2) + 0.25 * last
    first = (0 + 0.5 * 2 - 1) + 0.25 * middle
    gains = torch.tensor([first, middle, last]).double()
    assert returns.tolist() == [[first + 1, middle + 2, 0, last + 4, 0]]
    assert not advantages[0, [2, 4]].any()
    expected = (gains - gains.mean()) / gains.std()
    torch.testing.assert_close(advantages[0, [0, 1, 3]], expected, rtol=1e-6, atol=1e-6)


@for_each("gamma", [0.0, 0.9, 1.0])
@for_each("lam", [0.0, 0.5, 1.0])
def test_gae_is_the_discounted_sum_of_td_errors(gamma: float, lam: float) -> None:
    inputs = make_inputs("gae", 5)
    _, returns = ADVANTAGES["gae"](**inputs, gamma=gamma, lam=lam)
    for sample in inputs["valid_B"].nonzero().flatten().tolist():
        tokens = inputs["response_mask_BT"][sample].nonzero().flatten().tolist()
        rewards = inputs["token_level_rewards_BT"][sample, tokens].tolist()
        values = [*inputs["values_BT"][sample, tokens].tolist(), 0.0]
        surprises = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(tokens))]
        for t, position in enumerate(tokens):
            gain = sum((gamma * lam) ** k * surprise for k, surprise in enumerate(surprises[t:]))
            assert returns[sample, position].item() == pytest.approx(gain + values[t], abs=1e-9)


def test_gae_with_lam_1_returns_the_discounted_rewards_to_go() -> None:
    inputs = make_inputs("gae", 2)
    _, returns = ADVANTAGES["gae"](**inputs, gamma=0.9, lam=1.0)
    values = inputs.pop("values_BT")
    assert values.any()
    _, discounted = ADVANTAGES["reinforce_plus_plus"](**inputs, gamma=0.9)
    torch.testing.assert_close(returns, discounted, rtol=1e-9, atol=1e-9)


def test_gae_passes_no_gradient_to_the_values() -> None:
    inputs = make_inputs("gae", 2)
    inputs["values_BT"].requires_grad_()
    assert not any(tensor.requires_grad for tensor in ADVANTAGES["gae"](**inputs))


@for_each(("name", "option"), [("gae", "gamma"), ("gae", "lam"), ("reinforce_plus_plus", "gamma")])
@for_each("value", [-0.1, 1.1, float("nan")])
def test_gae_and_reinforce_plus_plus_refuse_discounts_outside_0_to_1(name: str, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{option}={value}: .*must be between 0 and 1"):
        ADVANTAGES[name](**make_inputs(name, 0), **{option: value})


def test_whiten_gives_mean_0_and_unbiased_variance_1() -> None:
    values = torch.tensor([[1.0, 2.0, torch.nan], [6.0, torch.inf, 3.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    white = whiten(values, mask, one_rank)
    assert (white[mask == 0] == 0).all()
    assert white.dtype == torch.float32
    assert white[mask == 1].mean().item() == pytest.approx(0, abs=1e-6)
    assert white[mask == 1].var().item() == pytest.approx(1, abs=1e-6)  # torch's is unbiased.


def test_whiten_only_centres_a_single_token() -> None:
    values = torch.tensor([[3.0, torch.nan]])
    assert whiten(values, torch.tensor([[1, 0]]), one_rank).tolist() == [[0, 0]]
    assert whiten(values, torch.tensor([[0, 0]]), one_rank).tolist() == [[0, 0]]
    assert whiten(torch.zeros(0, 3), torch.zeros(0, 3), one_rank).shape == (0, 3)


def test_whiten_only_centres_a_single_token_without_eps() -> None:
    assert whiten(torch.tensor([[3.0, 5.0]]), torch.tensor([[1, 0]]), one_rank, eps=0.0).tolist() == [[0, 0]]


@for_each("value", [0.1, -0.3, 1e6 + 0.1])
@for_each("size", [2, 3, 7, 10, 1001])
@for_each("dtype", [torch.float32, torch.float64])
def test_whiten_gives_zero_for_equal_values(value: float, size: int, dtype: torch.dtype) -> None:
    """Equal values have a variance of 0: the root of eps would divide the rounding error of their mean."""
    white = whiten(torch.full((size, 3), value, dtype=dtype), torch.ones(size, 3), one_rank)
    assert (white.abs() < 1e-20).all()


def test_whiten_adds_eps_to_the_variance() -> None:
    white = whiten(torch.tensor([[-1.0, 1.0]]).double(), torch.ones(1, 2), one_rank, eps=2.0)  # The variance is 2.
    assert white.tolist() == [[-0.5, 0.5]]
