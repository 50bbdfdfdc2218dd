"""RewardFunction: arguments by name, every kind of function, and every kind of failure."""

from __future__ import annotations

import bdb
from typing import Any

import pytest

from rl_plugins import user_code
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.calling import RewardFunction
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.tests.patience import patient

HERE = "rl_plugins.tests.rewards.sample_rewards"
# Deadline for calls with a result, and for calls with an alarm of their own.
DEADLINE_S = patient(60)


def request(solution: str, **fields: Any) -> ScoringRequest:
    return ScoringRequest(
        **{
            "data_source": "s",
            "solution_str": solution,
            "ground_truth": "yes",
            "extra_info": {"index": 7},
            **fields,
        }
    )


def score(name: str, *solutions: str, deadline_s: float | None = DEADLINE_S, **options: Any) -> list[Score | None]:
    scorer = RewardFunction({"_target_": f"{HERE}.{name}", **options})
    return scorer.score([request(solution) for solution in solutions], deadline_s)


def values(scores: list[Score | None]) -> list[float | None]:
    assert all(score is not None and score.failure is None for score in scores), scores
    return [score.value for score in scores if score is not None]


def test_score_passes_arguments_by_name() -> None:
    assert values(score("is_right", "yes", "no")) == [1.0, 0.0]


def test_score_passes_every_field_to_var_keyword_and_keeps_details() -> None:
    (result,) = score("everything", "x")
    assert result == Score(value=8.0, details={"known": 7.0})


def test_score_passes_configured_arguments_and_defaults() -> None:
    assert values(score("weighted", "abc", weight=2)) == [6.0]
    assert values(score("weighted", "abc", weight=2, bonus=1)) == [7.0]


def test_score_calls_a_batched_function_once() -> None:
    assert values(score("batch_lengths", "a", "bb", "")) == [1.0, 2.0, 0.0]
    assert values(score("batch_size", "a", "b", "c")) == [3.0] * 3


def test_score_runs_coroutines_concurrently_and_keeps_the_order() -> None:
    assert values(score("Meeting", *("x" * n for n in range(20)), parties=20)) == list(range(20))


def test_score_accepts_a_batched_coroutine_function_and_an_async_object() -> None:
    assert values(score("batch_lengths_async", "a", "bb")) == [1.0, 2.0]
    assert values(score("Remembering", "a", "bb", offset=10)) == [11.0, 12.0]


def test_score_accepts_numpy_scalars() -> None:
    assert values(score("obey", "numpy", "numpy bool")) == [0.5, 1.0]
    assert score("obey", "0-d") == [Score(value=2.0, details={"hits": 3.0})]


def test_score_leaves_out_texts_beside_the_score() -> None:
    assert score("obey", "text detail") == [Score(value=1.0, details={"acc": 1.0})]


@pytest.mark.parametrize(
    ("solution", "failure", "message"),
    [
        ("raise", "raised", "ZeroDivisionError: division by zero"),
        ("exit", "raised", "SystemExit: 3"),
        ("nan", "not_finite", "'score' is nan"),
        ("inf", "not_finite", "'detail' is inf"),
        ("huge", "not_finite", "too large"),
        ("beyond float32", "not_finite", "too large: training takes numbers up to 1e+18"),
        ("text", "raised", "the result is text, not a number"),
        ("none", "raised", "of type NoneType"),
        ("complex", "raised", "of type complex"),
        ("no score", "raised", "no 'score', only ['reward']"),
        ("list detail", "raised", "'answer' is of type list"),
    ],
)
@pytest.mark.parametrize("function", ["obey", "obey_async"])
def test_score_records_the_failure_of_a_sample(function: str, solution: str, failure: str, message: str) -> None:
    (result,) = score(function, solution)
    assert result is not None and result.value is None
    assert result.failure == failure
    assert message in result.message and function in result.message


@pytest.mark.parametrize(
    ("function", "solution"),
    [
        ("obey", "loop"), ("obey", "swallow"), ("obey_async", "loop"), ("obey_async", "swallow"),
        ("obey_async", "await"), ("obey_async", "two callbacks"), ("obey_batch", "loop"),
    ],
)  # fmt: skip
def test_score_records_a_timeout_after_the_deadline(
    function: str, solution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "REPEAT_S", 0.05)
    (result,) = score(function, solution, deadline_s=0.05)
    assert result is not None and result.value is None
    assert result.failure == "timeout"
    assert "no result within 0.05 s" in result.message and function in result.message


def test_score_names_the_file_of_an_exception() -> None:
    (result,) = score("obey", "raise")
    assert result is not None and "sample_rewards.py:" in result.message


def test_score_fails_only_the_failing_sample() -> None:
    results = score("obey", "ab", "raise", "abc", "expire", "a")
    assert [(r.value, r.failure) for r in results if r] == [
        (2.0, None),
        (None, "raised"),
        (3.0, None),
        (None, "timeout"),
        (1.0, None),
    ]


def test_score_times_out_one_coroutine_and_records_a_raised_timeout_error_as_raised() -> None:
    results = score("obey_async", "ab", "await expire", "own timeout", "abc")
    assert [r.failure for r in results if r] == [None, "timeout", "raised", None]


@pytest.mark.parametrize("culprit", ["expire", "exit", "stubborn", "callback"])
def test_score_returns_none_for_coroutines_beside_a_coroutine_that_blocks_the_loop(culprit: str) -> None:
    results = score("obey_async", "a", culprit, "bb")
    assert results[1] is None
    assert all(result is None or result.failure is None for result in results)


def test_score_returns_none_for_a_waiting_coroutine_when_the_event_loop_swallows_the_alarm() -> None:
    assert score("obey_async", "await", "callback") == [None, None]


@pytest.mark.parametrize(
    ("solutions", "message"),
    [
        (["a", "raise"], "ZeroDivisionError"),
        (["a", "short"], "returned 1 results for 2 samples"),
        (["a", "scalar"], "not of type float"),
        (["a", "generator"], "not of type generator"),
    ],
)
def test_score_fails_all_samples_of_a_failing_batch(solutions: list[str], message: str) -> None:
    results = score("obey_batch", *solutions)
    assert [result.failure for result in results if result] == ["raised", "raised"]
    assert all(result is not None and message in result.message for result in results)


def test_score_times_out_a_whole_batch_and_fails_one_sample_for_nan() -> None:
    assert [r.failure for r in score("obey_batch", "a", "expire") if r] == ["timeout"] * 2
    assert [r.failure for r in score("obey_batch", "a", "nan") if r] == [None, "not_finite"]


def define(source: str, tmp_path: Any, **options: Any) -> RewardFunction:
    path = tmp_path / "rewards.py"
    path.write_text(source)
    return RewardFunction({"path": str(path), "name": "f", **options})


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("def f(completion): ...", {}, "asks for 'completion'.*configure the argument or give it a default"),
        ("def f(solution): ...", {}, "did you mean 'solution_str'"),
        ("def f(solution_str, ground_truths): ...", {}, "mixes 'solution_str'"),
        ("def f(solution_str, /): ...", {}, "positional-only"),
        ("def f(x=1): ...", {}, "takes none of data_source"),
        ("def f(solution_str, weight=1): ...", {"weigth": 2}, "no argument 'weigth'; did you mean 'weight'"),
        ("def f(solution_str, prompt): ...", {"prompt": "x"}, "'prompt' comes from the sample"),
    ],
)
def test_reward_function_refuses_a_signature_with_arguments_that_are_not_known(
    tmp_path: Any, source: str, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        define(source, tmp_path, **options)


def test_score_raises_keyboard_interrupt_and_bdb_quit(tmp_path: Any) -> None:
    scorer = define(
        "import bdb\ndef f(solution_str): raise {'k': KeyboardInterrupt, 'b': bdb.BdbQuit}[solution_str]",
        tmp_path,
    )
    with pytest.raises(KeyboardInterrupt):
        scorer.score([request("k")], DEADLINE_S)
    with pytest.raises(bdb.BdbQuit):
        scorer.score([request("b")], DEADLINE_S)


def test_score_returns_replies_of_an_environment_while_turns_are_left() -> None:
    scorer = RewardFunction({"_target_": f"{HERE}.haggle"})
    said = ({"role": "assistant", "content": "no"}, {"role": "user", "content": "sure?"})
    asked = [
        request("no", turns_left=1), request("maybe", turns_left=1), request("yes", turns_left=1), request("no"),
        request("yes", prompt=[{"role": "user", "content": "well?"}], turns=said),
    ]  # fmt: skip
    assert scorer.score(asked, DEADLINE_S) == [
        Score(None, reply={"role": "user", "content": "sure?"}),
        Score(None, reply={"role": "tool", "content": "MAYBE"}),
        Score(1.0, {"said": 1.0}),
        Score(0.0, {"said": 1.0}),
        Score(1.0, {"said": 4.0}),
    ]


def test_score_fails_a_reply_without_turns_left() -> None:
    (score_,) = score("insists", "x")
    assert score_ is not None and score_.failure == "raised" and score_.value is None
    assert "no turn is left for a conversation: return a score" in score_.message


def test_score_fails_a_reply_that_is_not_text() -> None:
    (score_,) = RewardFunction({"_target_": f"{HERE}.mumbles"}).score([request("x", turns_left=1)], DEADLINE_S)
    assert score_ is not None and score_.failure == "raised" and "of type int, not text" in score_.message


def test_score_ends_a_copy_of_the_process(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    scorer = define(
        "import os\n"
        "def f(solution_str):\n"
        "    copy = os.fork()\n"
        "    return float(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])) if copy else 0.0\n",
        tmp_path,
    )
    assert scorer.score([request("x")], DEADLINE_S) == [Score(1.0)]
    assert "a copy of the process made by os.fork was ended" in capfd.readouterr().err
