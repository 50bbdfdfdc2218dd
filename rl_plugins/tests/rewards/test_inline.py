"""Scoring in this process, and the check of a reward on one sample."""

from __future__ import annotations

import subprocess
import sys
from types import FrameType
from typing import Any

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.rewards import InlineScorer, RewardFailureError, RewardPool, ScoringRequest, check_reward

HERE = "rl_plugins.tests.rewards.sample_rewards"


def request(solution: str, source: str = "s") -> ScoringRequest:
    return ScoringRequest(data_source=source, solution_str=solution, ground_truth="yes", extra_info={})


def test_scores_in_order() -> None:
    scorer = InlineScorer({"_target_": f"{HERE}.length"}, deadline_s=1.0)
    assert [score.value for score in scorer.score([request("abc"), request(""), request("a")])] == [
        3.0,
        0.0,
        1.0,
    ]
    assert scorer.score([]) == []
    scorer.close()


def test_coroutines_beside_a_blocking_one_are_scored_after_all() -> None:
    scorer = InlineScorer({"_target_": f"{HERE}.obey_async"}, deadline_s=0.2, max_failure_rate=0.5)
    scores = scorer.score([request("a"), request("loop"), request("bb")])
    assert [(score.value, score.failure) for score in scores] == [(1.0, None), (None, "timeout"), (2.0, None)]


def test_too_many_failures_raise() -> None:
    scorer = InlineScorer({"_target_": f"{HERE}.obey"})
    with pytest.raises(RewardFailureError, match="1 of 2 rewards failed"):
        scorer.score([request("a"), request("raise")])


def test_an_unknown_source_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="'s'"):
        InlineScorer({"math": {"_target_": f"{HERE}.length"}}).score([request("a")])


def test_check_reward_returns_the_score_or_the_cause() -> None:
    assert check_reward({"_target_": f"{HERE}.obey"}, request("four")).value == 4.0
    with pytest.raises(ConfigError, match=r"data_source 's': raised: .*ZeroDivisionError"):
        check_reward({"_target_": f"{HERE}.obey"}, request("raise"))
    with pytest.raises(ConfigError, match="timeout"):
        check_reward({"_target_": f"{HERE}.obey"}, request("loop"), deadline_s=0.2)


def test_the_room_imports_nothing_heavy() -> None:
    code = "import sys, rl_plugins.rewards; print(sorted({'ray', 'torch', 'sympy', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_breakpoint_outlasts_the_deadline(tmp_path: object) -> None:
    program = f"""
from rl_plugins.rewards import InlineScorer, ScoringRequest
import pathlib
path = pathlib.Path({str(tmp_path)!r}) / "debugged.py"
path.write_text("def f(solution_str):\\n    breakpoint()\\n    return len(solution_str)\\n")
scorer = InlineScorer(dict(path=str(path), name="f"), deadline_s=0.3)
print("SCORE", scorer.score([ScoringRequest("s", "abc", None, dict())])[0].value)
"""
    session = "import time; time.sleep(1.0)\np 'value', solution_str\nc\n"
    result = subprocess.run([sys.executable, "-c", program], input=session, capture_output=True, text=True, timeout=60)
    assert "('value', 'abc')" in result.stdout, result.stderr
    assert "SCORE 3.0" in result.stdout, result.stderr


@pytest.mark.parametrize("option", [{"num_workers": 0}, {"deadline_s": 0}, {"chunk_size": 0}])
def test_the_pool_checks_its_options_first(option: dict[str, int]) -> None:
    options: dict[str, Any] = {"num_workers": 1, "deadline_s": 1.0, **option}
    with pytest.raises(ConfigError, match=next(iter(option))):
        RewardPool({"_target_": f"{HERE}.length"}, **options)


def test_the_pool_says_that_it_needs_ray() -> None:
    with pytest.raises(ConfigError, match="InlineScorer"):
        RewardPool({"_target_": f"{HERE}.length"}, num_workers=1, deadline_s=1.0)


def test_under_a_debugger_a_coroutine_has_no_deadline_either() -> None:
    def trace(frame: FrameType, event: str, argument: Any) -> None:
        return None

    scorer = InlineScorer({"_target_": f"{HERE}.waits"}, deadline_s=0.05)
    previous = sys.gettrace()
    try:
        sys.settrace(trace)
        assert scorer.score([request("abc")])[0].value == 3.0
    finally:
        sys.settrace(previous)
