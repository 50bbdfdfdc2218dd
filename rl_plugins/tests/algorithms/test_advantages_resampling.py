"""Weights of samples by their rewards, and the draw of the samples to train on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_plugins.algorithms.advantages.resampling import resample, resampling_weights
from rl_plugins.tests.loops import for_each

REWARDS = torch.tensor([-3.0, 0.0, 2.0, 2.0])


@for_each(
    ("options", "expected"),
    [
        ({}, [9, 0, 4, 4]),
        ({"power": 1.0}, [3, 0, 2, 2]),
        ({"power": 0.0}, [1, 1, 1, 1]),
        ({"kind": "extremes"}, [1, 0, 1, 1]),
        ({"kind": "best"}, [0.1, 0.1, 0.4, 0.4]),
    ],
)
def test_resampling_weights_follow_kind_and_power(options: dict[str, Any], expected: list[float]) -> None:
    assert resampling_weights(rewards_B=REWARDS, **options).tolist() == pytest.approx(expected, abs=1e-7)


@for_each("kind", ["power", "extremes", "best"])
@for_each("garbage", [torch.nan, torch.inf, 100.0, -100.0])
def test_resampling_weights_ignore_invalid_samples(kind: Any, garbage: float) -> None:
    rewards = torch.cat([REWARDS, torch.tensor([garbage])])
    valid = torch.tensor([True] * 4 + [False])
    weights = resampling_weights(rewards_B=rewards, valid_B=valid, kind=kind)
    assert torch.equal(weights[:4], resampling_weights(rewards_B=REWARDS, kind=kind))
    assert weights[4] == 0


def test_resampling_weights_are_equal_for_rewards_of_zero() -> None:
    weights = resampling_weights(rewards_B=torch.zeros(4))
    assert (weights > 0).all()
    assert weights.unique().numel() == 1


def test_resample_draws_in_proportion_to_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 3.0]).repeat(2000)
    drawn = resample(weights_B=weights, generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (6000,)
    counts = torch.bincount(drawn % 3, minlength=3)
    assert counts[0] == 0
    assert counts[2] / 6000 == pytest.approx(0.75, abs=0.03)


def test_resample_draws_the_same_with_generators_of_one_seed() -> None:
    weights = resampling_weights(rewards_B=REWARDS)
    first, second = (resample(weights_B=weights, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)


def test_resample_of_an_empty_batch_is_empty() -> None:
    assert resample(weights_B=resampling_weights(rewards_B=torch.zeros(0))).tolist() == []


def test_resample_refuses_a_batch_without_valid_samples() -> None:
    weights = resampling_weights(rewards_B=REWARDS, valid_B=torch.zeros(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="every weight is 0"):
        resample(weights_B=weights)


def test_resampling_weights_refuse_bad_options() -> None:
    with pytest.raises(ValueError, match=r"kind='worst': use 'power', 'extremes' or 'best'"):
        resampling_weights(rewards_B=REWARDS, kind="worst")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"power=-1\.0: use 0 or more"):
        resampling_weights(rewards_B=REWARDS, power=-1.0)
