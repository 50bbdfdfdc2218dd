"""InlineScorer and default_scorer, and the checks of RewardPool before the workers start."""

from __future__ import annotations

import os
import subprocess
import sys
from types import FrameType
from typing import Any

import pytest

from rl_plugins.errors import ConfigError, DataError, RewardError
from rl_plugins.rewards.inline import InlineScorer, default_scorer
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.tests.patience import patient

HERE = "rl_plugins.tests.rewards.sample_rewards"
# Deadline for calls with a result, and for calls with an alarm of their own.
DEADLINE_S = patient(60)


def request(solution: str, source: str = "s") -> ScoringRequest:
    return ScoringRequest(data_source=source, solution_str=solution, ground_truth="yes", extra_info={})


def test_inline_scorer_scores_in_order() -> None:
    scorer = InlineScorer({"_target_": f"{HERE}.length"}, deadline_s=DEADLINE_S)
    assert [score.value for score in scorer.score([request("abc"), request(""), request("a")])] == [
        3.0,
        0.0,
        1.0,
    ]
    assert scorer.score([]) == []
    scorer.close()


def test_inline_scorer_scores_coroutines_beside_a_blocking_coroutine_again() -> None:
    scorer = InlineScorer({"_target_": f"{HERE}.obey_async"}, deadline_s=DEADLINE_S, max_failure_rate=0.5)
    scores = scorer.score([request("a"), request("expire"), request("bb")])
    assert [(score.value, score.failure) for score in scores] == [(1.0, None), (None, "timeout"), (2.0, None)]


def test_inline_scorer_raises_above_the_failure_rate() -> None:
    scorer = InlineScorer({"_target_": f"{HERE}.obey"})
    with pytest.raises(RewardError, match="1 of 2 rewards failed"):
        scorer.score([request("a"), request("raise")])


def test_inline_scorer_refuses_an_unknown_data_source() -> None:
    with pytest.raises(DataError, match="no reward for data_source 's'"):
        InlineScorer({"math": {"_target_": f"{HERE}.length"}}).score([request("a")])


def test_scorers_and_judges_import_no_heavy_module() -> None:
    modules = ", ".join(f"rl_plugins.rewards.{name}" for name in ("inline", "pool", "judge", "judge_server", "trial"))
    code = f"import sys, {modules}; print(sorted({{'ray', 'torch', 'sympy', 'numpy'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_inline_scorer_sets_no_deadline_at_a_breakpoint(tmp_path: object) -> None:
    program = f"""
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.records import ScoringRequest
import pathlib
path = pathlib.Path({str(tmp_path)!r}) / "debugged.py"
path.write_text("def f(solution_str):\\n    breakpoint()\\n    return len(solution_str)\\n")
scorer = InlineScorer(dict(path=str(path), name="f"), deadline_s={DEADLINE_S})
print("SCORE", scorer.score([ScoringRequest("s", "abc", None, dict())])[0].value)
"""
    # The signal of the timer at the deadline.
    session = "import signal; signal.raise_signal(signal.SIGALRM)\np 'value', solution_str\nc\n"
    # A driver of Ray sets a breakpoint function of Ray.
    environment = {**os.environ, "PYTHONBREAKPOINT": ""}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, input=session, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    assert "('value', 'abc')" in result.stdout, result.stderr
    assert "SCORE 3.0" in result.stdout, result.stderr
    assert "SoftDeadline" not in result.stdout


@pytest.mark.parametrize("option", [{"num_workers": 0}, {"deadline_s": 0}, {"chunk_size": 0}])
def test_reward_pool_refuses_wrong_options(option: dict[str, int]) -> None:
    options: dict[str, Any] = {"num_workers": 1, "deadline_s": 1.0, **option}
    with pytest.raises(ConfigError, match=next(iter(option))):
        RewardPool({"_target_": f"{HERE}.length"}, **options)


@pytest.mark.parametrize("traced", [False, True], ids=["no debugger", "debugger"])
def test_inline_scorer_sets_no_deadline_for_a_coroutine_under_a_debugger(traced: bool) -> None:
    def trace(frame: FrameType, event: str, argument: Any) -> None:
        return None

    config = {"_target_": f"{HERE}.length_past_every_deadline"}
    scorer = InlineScorer(config, deadline_s=DEADLINE_S, max_failure_rate=1.0)
    previous = sys.gettrace()
    try:
        sys.settrace(trace if traced else previous)
        (score,) = scorer.score([request("abc")])
    finally:
        sys.settrace(previous)
    assert (score.value, score.failure) == ((3.0, None) if traced else (None, "timeout"))


def right(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


class Right:
    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __call__(self, solution_str: str, ground_truth: str) -> float:
        return self.value * right(solution_str, ground_truth)


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (right, 1.0),
        (Right, 1.0),
        (Right(0.5), 0.5),
        ({"_target_": Right, "value": 2.0}, 2.0),
        ({"s": {"_target_": right}}, 1.0),
        ({"_target_": "rl_plugins.rewards.scorers.exact_match"}, 1.0),
    ],
)
def test_default_scorer_of_a_bare_reward_is_an_inline_scorer(reward: Any, value: float) -> None:
    scorer = default_scorer(reward)
    assert isinstance(scorer, InlineScorer)
    assert [score.value for score in scorer.score([request("yes")])] == [value]


def test_default_scorer_names_a_function_with_unknown_arguments() -> None:
    def strange(answer: str) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"strange.*'answer'"):
        default_scorer(strange)
