"""Overlong penalty, clipped rewards and the length penalty: by hand and by their properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st

from rl_plugins.algorithms.reward_shaping import RewardShaping, clip_rewards, length_penalty, overlong_penalty
from rl_plugins.launch.compose import compose_config
from rl_plugins.tests.loops import for_each


def test_overlong_penalty_matches_a_computation_by_hand() -> None:
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480, 20481, 10**6])
    penalty = overlong_penalty(response_lengths_B=lengths, max_tokens=20480, buffer_tokens=4096)
    torch.testing.assert_close(penalty, torch.tensor([0, 0, -1 / 4096, -0.5, -1, -1, -1]))
    halved = overlong_penalty(response_lengths_B=lengths, max_tokens=20480, buffer_tokens=4096, factor=0.5)
    torch.testing.assert_close(halved, penalty / 2)


@given(
    lengths=st.lists(st.integers(0, 300), max_size=20).map(sorted),
    buffer=st.integers(1, 200),
    factor=st.floats(0, 10),
)
def test_overlong_penalty_falls_with_the_length_and_is_bounded(lengths: list[int], buffer: int, factor: float) -> None:
    lengths_B = torch.tensor(lengths, dtype=torch.float64)
    penalty = overlong_penalty(response_lengths_B=lengths_B, max_tokens=200, buffer_tokens=buffer, factor=factor)
    assert (penalty.diff() <= 0).all() and (penalty <= 0).all() and (penalty >= -factor).all()
    assert not penalty[lengths_B <= 200 - buffer].any()
    assert (penalty[lengths_B >= 200] == -factor).all()


@for_each("options", [{"buffer_tokens": 0}, {"buffer_tokens": 11}, {"factor": -1.0}])
def test_overlong_penalty_refuses_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        overlong_penalty(response_lengths_B=torch.tensor([1]), **{"max_tokens": 10, "buffer_tokens": 5, **options})


def test_overlong_penalty_of_the_dapo_recipe_has_the_share_of_the_paper() -> None:
    """The slope is a fifth of the response length: 4096 of 20480 tokens."""
    for max_tokens, expected in ((20480, 4096), (8, 2), (1, 1)):
        overrides = ["model.path=none", "algorithm=dapo", f"sampling.max_tokens={max_tokens}"]
        penalty = instantiate(compose_config("grpo", overrides).algorithm.shaping.overlong)
        assert penalty.slope_tokens == expected
        lengths_B = torch.tensor([max_tokens - expected, max_tokens])
        shaped_B = RewardShaping(overlong=penalty).shaped(
            scores_B=torch.zeros(2),
            response_lengths_B=lengths_B,
            groups_B=torch.zeros(2, dtype=torch.long),
            valid_B=torch.ones(2, dtype=torch.bool),
        )
        assert shaped_B.tolist() == [0, -1]


def test_clip_rewards_clips_to_low_and_high() -> None:
    rewards = torch.tensor([-20.0, -1.0, 0.5, 11.0, math.inf, math.nan])
    clipped = clip_rewards(rewards_B=rewards, low=-10, high=10)
    torch.testing.assert_close(clipped, torch.tensor([-10.0, -1.0, 0.5, 10.0, 10.0, math.nan]), equal_nan=True)
    with pytest.raises(ValueError, match="low=1 and high=0"):
        clip_rewards(rewards_B=rewards, low=1, high=0)


def test_length_penalty_matches_a_computation_by_hand() -> None:
    inputs: dict[str, Any] = {
        # A group of four and an invalid one, one whose lengths are equal, one alone, one with nothing valid.
        "groups_B": torch.tensor([7, 7, 2, 7, 7, 7, 2, 9, 5]),
        "response_lengths_B": torch.tensor([10, 20, 4, 40, 50, 1000, 4, 8, 3]),
        "is_correct_B": torch.tensor([True, False, True, True, False, True, False, True, True]),
        "valid_B": torch.tensor([True, True, True, True, True, False, True, True, False]),
    }
    expected = torch.tensor([0.5, 0.0, 0.0, -0.25, -0.5, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(length_penalty(**inputs), expected)
    torch.testing.assert_close(length_penalty(**inputs, factor=0.2), 0.2 * expected)
    order = torch.tensor([3, 8, 0, 5, 1, 7, 2, 6, 4])
    permuted = length_penalty(**{name: x[order] for name, x in inputs.items()})
    assert torch.equal(permuted, length_penalty(**inputs)[order])
    with pytest.raises(ValueError, match="factor=-1"):
        length_penalty(**inputs, factor=-1)


@given(
    samples=st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 3), st.booleans()), max_size=20),
)
def test_length_penalty_agrees_with_plain_loops(samples: list[tuple[int, bool, int, bool]]) -> None:
    lengths, correct, groups, valid = (list(column) for column in zip(*samples, strict=True)) if samples else [[]] * 4
    found = length_penalty(
        response_lengths_B=torch.tensor(lengths, dtype=torch.float64),
        is_correct_B=torch.tensor(correct, dtype=torch.bool),
        groups_B=torch.tensor(groups, dtype=torch.int64),
        valid_B=torch.tensor(valid, dtype=torch.bool),
    )
    for i, (length, is_correct, group, is_valid) in enumerate(samples):
        members = [other[0] for other in samples if other[2] == group and other[3]]
        expected = 0.0
        if is_valid and max(members) > min(members):
            expected = 0.5 - (length - min(members)) / (max(members) - min(members))
            expected = expected if is_correct else min(0.0, expected)
        assert float(found[i]) == pytest.approx(expected, abs=1e-12)
