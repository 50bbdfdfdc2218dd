"""failure_counts counts failures by kind, and FailureRate raises with the most frequent reason."""

from __future__ import annotations

import pytest

from rl_plugins.errors import RewardError
from rl_plugins.rewards.records import FailureRate, Score, failure_counts

GOOD = Score(value=0.0)
SLOW = Score(value=None, failure="timeout", message="too slow")
BAD = Score(value=None, failure="raised", message="ValueError: no")


def test_failure_counts_has_every_kind() -> None:
    assert failure_counts([GOOD, SLOW, BAD, BAD]) == {
        "raised": 2,
        "timeout": 1,
        "not_finite": 0,
        "died": 0,
        "memory": 0,
        "image": 0,
    }


def test_failure_rate_names_the_most_frequent_reason() -> None:
    with pytest.raises(RewardError, match=r"3 of 4 .*raised \(2 times\).*ValueError: no"):
        FailureRate(0.0).add([SLOW, BAD, GOOD, BAD])


def test_failure_rate_logs_the_first_failure_of_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    rate = FailureRate(0.5)
    for _ in range(2):
        rate.add([SLOW, BAD, BAD, *[GOOD] * 9])
    assert [record.message for record in caplog.records] == [
        f"a reward failed ({score.failure}): {score.message}" for score in (SLOW, BAD)
    ]


def test_failure_rate_allows_single_failures_in_small_calls() -> None:
    rate = FailureRate(0.1)
    for _ in range(50):
        rate.add([BAD, *[GOOD] * 10])
    with pytest.raises(RewardError, match="1 of 8"):
        FailureRate(0.0).add([BAD, *[GOOD] * 7])


def test_failure_rate_ends_a_run_whose_reward_is_broken_in_small_calls() -> None:
    rate, calls = FailureRate(0.1), 0
    for _ in range(100):
        rate.add([GOOD] * 8)
    with pytest.raises(RewardError, match=r"12 of 112 rewards failed, more than max_failure_rate=0\.1 allows"):
        while calls < 9:
            calls += 1
            rate.add([BAD] * 4 + [GOOD] * 4)
    assert calls == 3


def test_failure_rate_judges_a_large_call_by_the_share_of_failures() -> None:
    rate = FailureRate(0.25)
    rate.check([BAD] * 10 + [None] * 10)
    rate.add([BAD] * 100 + [GOOD] * 300)
    with pytest.raises(RewardError, match="11 of 12"):
        FailureRate(0.25).check([BAD] * 11 + [None])
