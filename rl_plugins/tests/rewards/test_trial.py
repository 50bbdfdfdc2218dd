"""RewardTrial: each kind of fault ends the trial with one line, and leaves no process behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rewards.trial import RewardTrial
from rl_plugins.tests.patience import patient, wait_until

DEADLINE_S = patient(60)
HERE = "rl_plugins.tests.rewards.sample_rewards"


def request(solution: str, source: str = "s") -> ScoringRequest:
    return ScoringRequest(data_source=source, solution_str=solution, ground_truth="yes", extra_info={})


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def fault(
    reward: dict[str, str], solution: str, deadline_s: float = DEADLINE_S, load_timeout_s: float = DEADLINE_S
) -> str:
    before = children()
    with (
        pytest.raises(ConfigError) as raised,
        RewardTrial(reward, deadline_s=deadline_s, load_timeout_s=load_timeout_s, memory_mb=300) as trial,
    ):
        trial.score(request(solution))
    wait_until(lambda: children() <= before, "the end of all processes")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_trial_refuses_an_unknown_data_source() -> None:
    with (
        pytest.raises(ConfigError, match="no reward for data_source 's'"),
        RewardTrial({"math": {"_target_": f"{HERE}.length"}}) as trial,
    ):
        trial.score(request("a"))


def test_trial_returns_the_score_or_raises_the_cause() -> None:
    with RewardTrial({"_target_": f"{HERE}.obey"}) as trial:
        assert trial.score(request("four")).value == 4.0
        with pytest.raises(ConfigError, match=r"data_source 's': raised: .*ZeroDivisionError"):
            trial.score(request("raise"))


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        ("die", "obey ended with exit status 1 in place of a score: a reward must return"),
        ("end well", "obey ended with exit status 0 in place of a score"),
        ("exit", "raised: .*SystemExit: 3"),
        ("segfault", "obey was ended by the signal SIGSEGV"),
        # Alarms end the loop, or else the trial kills the process.
        ("deny", "within 0.3 s"),
        ("deaf", "obey did not return within 0.3 s and could not be interrupted: give its own waits a deadline"),
        ("grow", r"memory: .*raise memory_mb \(in a recipe"),
        ("bytes", "raised: .*'score' is of type bytes, not a number"),
        ("orphan", "obey ended with exit status 0 in place of a score"),
    ],
)
def test_reward_trial_tells_a_fault_of_a_call_in_one_line(solution: str, message: str) -> None:
    said = fault({"_target_": f"{HERE}.obey"}, solution, deadline_s=0.3 if "0.3" in message else DEADLINE_S)
    assert said.startswith("the reward fails on a sample of data_source 's': ") and f"{HERE}.obey" in said
    assert_matches(said, message)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import time; time.sleep(600)", "was not loaded within 1 s: load less at the start, or raise load_timeout_s"),
        ("import os; os._exit(0)", "ended with exit status 0 while the reward was loaded: a reward must not end"),
        ("import sys; sys.exit(0)", "its file failed: SystemExit: 0"),
        ("import os; os.abort()", "was ended by the signal SIGABRT while the reward was loaded"),
        ("[0] * 10**11", "its file failed: MemoryError"),
        ("class f:\n  def __init__(self): raise ValueError('no\\nkey')", "its constructor failed: ValueError: no key"),
    ],
)
def test_reward_trial_tells_a_fault_of_loading_in_one_line(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    limit = 1.0 if "sleep" in source else DEADLINE_S
    said = fault({"path": str(tmp_path / "mine.py"), "name": "f"}, "x", load_timeout_s=limit)
    assert said.startswith(f"reward '{tmp_path / 'mine.py'}:f'")
    assert_matches(said, message)


def test_reward_trial_names_the_secret_that_a_reward_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "x")
    (tmp_path / "mine.py").write_text("import os\ndef f(solution_str): return float(bool(os.environ['JUDGE_API_KEY']))")
    config = {"path": str(tmp_path / "mine.py"), "name": "f"}
    assert fault(config, "x").endswith("this secret with pass_env=[JUDGE_API_KEY] (in a recipe: reward.pass_env)")
    with RewardTrial(config, pass_env=["JUDGE_API_KEY"]) as trial:
        assert trial.score(request("x")).value == 1.0


def test_reward_trial_in_this_process_calls_the_reward_here(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef f(solution_str): return os.getpid()")
    with RewardTrial({"path": str(tmp_path / "mine.py"), "name": "f"}, in_process=True) as trial:
        assert trial.score(request("x")).value == os.getpid()


def assert_matches(said: str, message: str) -> None:
    assert re.search(message, said), said
