"""WeightedSum adds plain, batched and async rewards, and a failing part fails one sample only."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.rewards import mixing
from rl_plugins.rewards.calling import CompositeReward, RewardFunction
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.records import Failure, Score, ScoringRequest
from rl_plugins.tests.patience import patient

HERE = "rl_plugins.tests.rewards.sample_rewards"
# Deadline for calls with a result, and for calls with an alarm of their own.
DEADLINE_S = patient(60)


def request(solution: str) -> ScoringRequest:
    return ScoringRequest("s", solution, "yes", {"index": 7})


def mixed(weights: dict[str, Any] | None = None, **parts: str) -> dict[str, Any]:
    rewards = {name: {"_target_": f"{HERE}.{function}"} for name, function in parts.items()}
    return {"_target_": "rl_plugins.rewards.mixing.WeightedSum", "rewards": rewards, "weights": weights}


def score(config: dict[str, Any], *solutions: str, deadline_s: float | None = DEADLINE_S) -> list[Score]:
    scorer = InlineScorer(config, deadline_s=deadline_s, max_failure_rate=1.0)
    return scorer.score([request(solution) for solution in solutions])


def test_weighted_sum_returns_the_sum_and_the_parts() -> None:
    config = mixed({"rule": 2.0, "size": -0.5}, rule="is_right", size="length")
    first, second = score(config, "yes", "no")
    assert first == Score(2.0 - 1.5, {"rule": 1.0, "size": 3.0})
    assert second == Score(-1.0, {"rule": 0.0, "size": 2.0})


def test_weighted_sum_has_weight_1_by_default_and_keeps_the_details_of_parts() -> None:
    (result,) = score(mixed(rule="is_right", all="everything"), "yes")
    assert result == Score(9.0, {"rule": 1.0, "all": 8.0, "all.known": 7.0})


@pytest.mark.parametrize(
    ("parts", "batched", "is_async"),
    [
        (["is_right", "length"], False, False),
        (["is_right", "batch_lengths"], True, False),
        (["is_right", "length_async"], False, True),
        (["batch_lengths", "length_async"], True, True),
        (["batch_lengths_async", "length"], True, True),
    ],
)
def test_weighted_sum_calls_plain_batched_and_async_parts(parts: list[str], batched: bool, is_async: bool) -> None:
    config = mixed(None, **dict(zip("ab", parts, strict=True)))
    scorer = RewardFunction(config)
    assert (scorer.batched, scorer.is_async) == (batched, is_async)
    single = {name: score({"_target_": f"{HERE}.{name}"}, "a", "bb", "yes") for name in parts}
    for row, result in enumerate(score(config, "a", "bb", "yes")):
        expected = [single[name][row].value for name in parts]
        assert list(result.details.values()) == expected
        assert result.value == sum(value or 0.0 for value in expected)


def test_weighted_sum_passes_the_whole_batch_to_a_part_and_runs_coroutines_concurrently() -> None:
    config = mixed(count="batch_size", meet="Meeting")
    config["rewards"]["meet"]["parties"] = 20
    results = score(config, *("x" * n for n in range(20)))
    assert [result.details for result in results] == [{"count": 20.0, "meet": float(n)} for n in range(20)]


@pytest.mark.parametrize(
    ("deed", "failure"), [("raise", "raised"), ("nan", "not_finite"), ("text", "raised"), ("expire", "timeout")]
)
@pytest.mark.parametrize("other", ["length", "batch_lengths", "length_async"])
def test_weighted_sum_fails_only_the_sample_of_a_failing_part(deed: str, failure: str, other: str) -> None:
    results = score(mixed(other=other, bad="obey"), "a", deed, "ccc")
    assert [result.failure for result in results] == [None, failure, None]
    assert [result.value for result in results] == [2.0, None, 6.0]
    assert results[1].message.startswith("bad: ")


def test_weighted_sum_scores_the_samples_of_a_hanging_batch_one_by_one() -> None:
    results = score(mixed(batch="obey_batch", size="length"), "a", "expire", "ccc")
    assert [result.failure for result in results] == [None, "timeout", None]


@pytest.mark.parametrize("parts", [("slow", "batch"), ("batch", "slow")], ids=" before ".join)
def test_weighted_sum_does_not_time_out_samples_that_are_slow_only_together(
    parts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(mixing, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(solution_str: str) -> float:
        clock[0] += 3000.0
        return 1.0

    config = mixed(None, **dict.fromkeys(parts, "batch_lengths"))
    config["rewards"]["slow"] = {"_target_": slow}
    results = score(config, *["slow"] * 4, deadline_s=7000.0)
    assert [result.value for result in results] == [5.0] * 4


class CountingJudge(CompositeReward):
    """Stand-in of a judge with metrics of its own."""

    batched, is_async = False, True

    def __init__(self, failure: Failure | None = None) -> None:
        self.failure = failure

    def __call__(self, requests: Sequence[ScoringRequest], deadline_s: float | None) -> list[Score | None]:
        """Return the same score for each request."""
        details = {"judge/calls": 2.0, "judge/cost": 0.5, "judge/latency_s": 3.0}
        return [Score(None if self.failure else 1.0, details, self.failure)] * len(requests)


def test_weighted_sum_adds_the_calls_and_costs_of_judges_also_in_a_failure() -> None:
    config = mixed(size="length")
    config["rewards"] |= {"a": {"_target_": CountingJudge}, "b": {"_target_": CountingJudge}}
    (result,) = score(config, "xyz")
    parts = {"size": 3.0, "a": 1.0, "a.judge/latency_s": 3.0, "b": 1.0, "b.judge/latency_s": 3.0}
    assert result == Score(5.0, {**parts, "judge/calls": 4.0, "judge/cost": 1.0})
    config["rewards"]["b"]["failure"] = "raised"
    (result,) = score(config, "xyz")
    assert result == Score(None, {"judge/calls": 4.0, "judge/cost": 1.0}, "raised", "b: ")


def test_weighted_sum_of_weights_that_add_up_to_one_is_one() -> None:
    weights = {"right": 0.7, "form": 0.2, "short": 0.1}
    assert sum(weights.values()) < 1
    (result,) = score(mixed(weights, **dict.fromkeys(weights, "is_right")), "yes")
    assert result.value == 1.0


def test_weighted_sum_fails_a_sum_that_is_not_finite() -> None:
    (result,) = score(mixed({"a": 1e308, "b": 1e308}, a="length", b="length"), "x" * 9)
    assert result.failure == "not_finite" and result.value is None


def test_weighted_sum_accepts_a_weighted_sum_as_a_part() -> None:
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
def test_weighted_sum_refuses_a_wrong_configuration(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardFunction(config)


def test_weighted_sum_fails_a_part_that_replies() -> None:
    scorer = InlineScorer(mixed(rule="is_right", talk="insists"), max_failure_rate=1.0)
    (result,) = scorer.answer([ScoringRequest("s", "yes", "yes", {"index": 7}, turns_left=3)])
    assert result.failure == "raised" and "talk: a part of a sum cannot reply" in result.message
