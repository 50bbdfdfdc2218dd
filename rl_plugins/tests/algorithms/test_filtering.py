"""`GroupFilter` keeps the groups with a gradient; `resample` draws samples by the weights of their rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.filtering import GroupFilter, resample, resampling_weights
from rl_plugins.errors import ConfigError
from rl_plugins.tests.loops import for_each

# Filter of groups ----------------------------------------------------------------------------------------------------

# Groups: mixed, all right, all wrong, mixed with a failure, one valid sample, none.
GROUPS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5])
SCORES = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, torch.nan, 1.0, 0.7, torch.nan, torch.nan])
VALID = ~SCORES.isnan()
TRUNCATED = torch.zeros(len(GROUPS), dtype=torch.bool)
TRUNCATED[[1, 6]] = True


def kept(group_filter: GroupFilter, order: Tensor | None = None) -> set[int]:
    order = torch.arange(len(GROUPS)) if order is None else order
    kept_B = group_filter.informative(
        scores_B=SCORES[order], groups_B=GROUPS[order], valid_B=VALID[order], truncated_B=TRUNCATED[order]
    )
    groups = GROUPS[order]
    for group in groups.unique():
        # A group stays or goes as a whole.
        assert kept_B[groups == group].unique().numel() == 1
    return set(groups[kept_B].tolist())


def test_informative_drops_groups_of_equal_scores_and_keeps_groups_of_one_sample() -> None:
    assert kept(GroupFilter()) == {0, 3, 4}
    assert kept(GroupFilter(), torch.randperm(len(GROUPS), generator=torch.Generator().manual_seed(0))) == {0, 3, 4}


def test_informative_keeps_groups_with_a_mean_between_low_and_high() -> None:
    assert kept(GroupFilter(low=0.6)) == {0, 4}
    assert kept(GroupFilter(high=0.6)) == {3}
    assert kept(GroupFilter(low=0.5, high=0.5)) == {3}


def test_informative_drops_groups_with_a_truncated_response() -> None:
    assert kept(GroupFilter(drop_truncated=True)) == {3, 4}


@for_each(
    ("options", "message"),
    [
        ({"max_batches": 0}, "max_batches=0: must be at least 1"),
        ({"oversampling": 0}, "oversampling=0: must be at least 1"),
        ({"low": 0.8, "high": 0.2}, "low=0.8 is above high=0.2"),
    ],
)
def test_group_filter_refuses_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupFilter(**options)  # type: ignore[arg-type]


# Resampling ---------------------------------------------------------------------------------------------------------

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
