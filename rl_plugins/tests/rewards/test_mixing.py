"""Weighted sums of plain, batched and asynchronous rewards; a failing part fails its sample and no other."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.rewards import InlineScorer, Score, ScoringRequest
from rl_plugins.rewards.calling import Scorer

HERE = "rl_plugins.tests.rewards.sample_rewards"


def request(solution: str) -> ScoringRequest:
    return ScoringRequest("s", solution, "yes", {"index": 7})


def mixed(weights: dict[str, Any] | None = None, **parts: str) -> dict[str, Any]:
    rewards = {name: {"_target_": f"{HERE}.{function}"} for name, function in parts.items()}
    return {"_target_": "rl_plugins.rewards.mixing.WeightedSum", "rewards": rewards, "weights": weights}


def score(config: dict[str, Any], *solutions: str, deadline_s: float | None = 5.0) -> list[Score]:
    scorer = InlineScorer(config, deadline_s=deadline_s, max_failure_rate=1.0)
    return scorer.score([request(solution) for solution in solutions])


def test_the_sum_and_its_parts() -> None:
    config = mixed({"rule": 2.0, "size": -0.5}, rule="is_right", size="length")
    first, second = score(config, "yes", "no")
    assert first == Score(2.0 - 1.5, {"rule": 1.0, "size": 3.0})
    assert second == Score(-1.0, {"rule": 0.0, "size": 2.0})


def test_parts_without_a_weight_count_once_and_details_of_parts_are_kept() -> None:
    (result,) = score(mixed(rule="is_right", all="everything"), "yes")
    assert result == Score(8.0, {"rule": 1.0, "all": 7.0, "all.known": 7.0})


@pytest.mark.parametrize(
    ("parts", "batched", "is_async"),
    [
        (["is_right", "length"], False, False),
        (["is_right", "batch_lengths"], True, False),
        (["is_right", "waits"], False, True),
        (["batch_lengths", "waits"], True, True),
        (["batch_waits", "length"], True, True),
    ],
)
def test_each_part_is_called_in_its_own_way(parts: list[str], batched: bool, is_async: bool) -> None:
    config = mixed(None, **dict(zip("ab", parts, strict=True)))
    scorer = Scorer(config)
    assert (scorer.batched, scorer.is_async) == (batched, is_async)
    single = {name: score({"_target_": f"{HERE}.{name}"}, "a", "bb", "yes") for name in parts}
    for row, result in enumerate(score(config, "a", "bb", "yes")):
        expected = [single[name][row].value for name in parts]
        assert list(result.details.values()) == expected
        assert result.value == sum(value or 0.0 for value in expected)


def test_a_batched_part_sees_the_whole_batch_and_coroutines_run_concurrently() -> None:
    started = time.monotonic()
    results = score(mixed(count="batch_size", wait="waits"), *("x" * n for n in range(20)))
    assert [result.details["count"] for result in results] == [20.0] * 20
    assert time.monotonic() - started < 2.0  # one after the other would take 4 s


@pytest.mark.parametrize(
    ("deed", "failure"), [("raise", "raised"), ("nan", "not_finite"), ("text", "raised"), ("loop", "timeout")]
)
@pytest.mark.parametrize("other", ["length", "batch_lengths", "waits"])
def test_a_failing_part_fails_its_sample_and_no_other(deed: str, failure: str, other: str) -> None:
    results = score(mixed(other=other, bad="obey"), "a", deed, "ccc", deadline_s=0.4)
    assert [result.failure for result in results] == [None, failure, None]
    assert [result.value for result in results] == [2.0, None, 6.0]
    assert results[1].message.startswith("bad: ")


def test_a_hanging_batch_is_taken_apart() -> None:
    results = score(mixed(batch="obey_batch", size="length"), "a", "loop", "ccc", deadline_s=0.3)
    assert [result.failure for result in results] == [None, "timeout", None]


def test_slow_samples_are_not_blamed_for_their_number() -> None:
    results = score(mixed(slow="obey", batch="batch_lengths"), *["slow"] * 4, deadline_s=0.7)
    assert [result.value for result in results] == [5.0] * 4


def test_a_sum_beyond_all_numbers_is_no_score() -> None:
    (result,) = score(mixed({"a": 1e308, "b": 1e308}, a="length", b="length"), "x" * 9)
    assert result.failure == "not_finite" and result.value is None


def test_sums_can_be_parts_of_sums() -> None:
    outer = mixed({"inner": 10.0}, inner="length")
    outer["rewards"]["inner"] = mixed(size="batch_lengths")
    assert score(outer, "ab") == [Score(20.0, {"inner": 2.0, "inner.size": 2.0})]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (mixed(), "WeightedSum has no rewards"),
        (mixed({"ruel": 1.0}, rule="length"), "a weight for 'ruel', but no reward; did you mean 'rule'"),
        (mixed({"rule": "much"}, rule="length"), "the weight of 'rule' is 'much', not a finite number"),
        (mixed({"rule": float("nan")}, rule="length"), "the weight of 'rule' is nan"),
        (mixed(rule="lenght"), "did you mean 'length'"),
        ({**mixed(rule="length"), "rewards": {"rule": 3}}, "the reward 'rule' is 3, not a mapping"),
    ],
)
def test_wrong_configurations_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scorer(config)


def test_a_part_that_answers_is_refused() -> None:
    scorer = InlineScorer(mixed(rule="is_right", talk="insists"), max_failure_rate=1.0)
    (result,) = scorer.answer([ScoringRequest("s", "yes", "yes", {"index": 7}, turns_left=3)])
    assert result.failure == "raised" and "talk: a part of a sum cannot answer" in result.message
