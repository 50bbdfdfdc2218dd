"""Preference optimization with ZeRO-3 on two ranks gives the weights of one process."""

from __future__ import annotations

import pytest

from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import zero_preferences_worker


@pytest.mark.parametrize("case", zero_preferences_worker.CASES)
def test_zero_3_on_two_ranks_gives_the_preference_weights_of_one_process(case: str) -> None:
    expected = zero_preferences_worker.in_one_process(case)
    start = zero_preferences_worker.OwnPolicy().model.state_dict()
    largest = max(float((weight - start[name]).abs().max()) for name, weight in expected.items())
    assert largest > 1e-3
    for actual, _ in run_ranks(zero_preferences_worker.rank_weights, case):
        assert actual.keys() == expected.keys()
        for name, weight in expected.items():
            assert float((actual[name] - weight).abs().max()) < 1e-3 * largest, name
