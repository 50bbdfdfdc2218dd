"""`GroupFilter` keeps the groups that give a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.group_filter import GroupFilter
from rl_plugins.errors import ConfigError
from rl_plugins.tests.loops import for_each

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
