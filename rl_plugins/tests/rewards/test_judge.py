"""Judge as a reward: template, votes, scale, cached answers, metrics, failures and the key."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

import rl_plugins as rl
from rl_plugins.config.judge import ENGINE_KEY, JudgeConfig, with_engines, with_judges
from rl_plugins.errors import ConfigError, RewardError
from rl_plugins.rewards import judge as judge_module
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.judge import Judge
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import Score
from rl_plugins.rewards.trial import RewardTrial, trial_deadline_s
from rl_plugins.stages.metrics import mean_details, sum_details
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import patient
from rl_plugins.tests.rewards.judge_stub import KEY, OVERLOADED, JudgeStub, Said, judge_stub, request, settings
from rl_plugins.user_code import run_concurrently

TARGET = "rl_plugins.rewards.judge.Judge"
DEADLINE_S = patient(60)

pytestmark = pytest.mark.usefixtures("short_delays")


def score(stub: JudgeStub, *solutions: str, **options: Any) -> list[Score]:
    scores = Judge(settings(stub.url, **options))([request(solution) for solution in solutions], DEADLINE_S)
    return [one for one in scores if one is not None]


def question(stub: JudgeStub) -> str:
    return str(stub.requests[-1]["messages"][0]["content"])


def test_judge_scores_a_batch_and_maps_the_range_to_0_to_1(stub: JudgeStub) -> None:
    def answer(number: int, body: Any) -> Said:
        return Said(f'{{"score": {10 if "RIGHT" in body["messages"][0]["content"] else 2}}}')

    stub.answer = answer
    assert [one.value for one in score(stub, "RIGHT", "WRONG", "RIGHT")] == [1.0, 0.2, 1.0]
    assert [one.value for one in score(stub, "WRONG", scale="raw")] == [2.0]
    assert [one.value for one in score(stub, "WRONG", low=-10.0)] == [0.6]


def test_judge_asks_with_the_schema_and_the_sampling_options(stub: JudgeStub) -> None:
    score(stub, "4", max_tokens=50, request={"top_p": 0.5, "max_tokens": None, "max_completion_tokens": 9})
    body = stub.requests[-1]
    assert body["model"] == "judge" and body["temperature"] == 0.0 and body["top_p"] == 0.5
    assert "max_tokens" not in body and body["max_completion_tokens"] == 9
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "number", "minimum": 0.0, "maximum": 10.0}
    score(stub, "4", response_format="json_object")
    assert stub.requests[-1]["response_format"] == {"type": "json_object"}
    score(stub, "4", response_format="none", temperature=None)
    assert not {"response_format", "temperature"} & stub.requests[-1].keys()


def test_judge_fills_the_template_once(stub: JudgeStub, tmp_path: Path) -> None:
    text = '{prompt}|{response}|{ground_truth}|{data_source}|{extra_info.hint}|{low}-{high}|{{response}}|{"a": 1}'
    filled = '2 + 2?|{ground_truth}|four|sums|even|0-10|{response}|{"a": 1}'
    score(stub, "{ground_truth}", template=text)
    assert question(stub) == filled
    (tmp_path / "rubric.txt").write_text(text)
    score(stub, "{ground_truth}", template_file=str(tmp_path / "rubric.txt"))
    assert question(stub) == filled
    score(stub, "five", template="{messages}")
    assert question(stub) == "[user]\n2 + 2?\n\n[assistant]\nfive"
    score(stub, "five")
    assert "five" in question(stub) and "from 0 to 10" in question(stub) and '{"reason": "...", ' in question(stub)


@for_each(
    ("template", "values", "message"),
    [
        ("{response} {extra_info.other}", {}, "extra_info has no 'other', only: hint"),
        ("{response} {extra_info.hint.more}", {}, "extra_info has no 'more', only: no mapping"),
        ("{response} {prompt}", {"prompt": None}, "a sample has no prompt"),
    ],
)
def test_judge_fails_a_sample_without_the_text_of_a_placeholder(
    template: str, values: dict[str, Any], message: str
) -> None:
    judge = Judge(settings("http://127.0.0.1:9/v1", template=template))
    (result,) = judge([request(**values)], DEADLINE_S)
    assert result is not None and result.failure == "raised" and message in result.message


def test_judge_combines_votes_and_measures_agreement(stub: JudgeStub) -> None:
    stub.answer = lambda number, body: Said(f"Score: {(2, 2, 2, 10)[number % 4]}")
    (mean,) = score(stub, "4", votes=4, temperature=1.0)
    (median,) = score(stub, "4", votes=4, temperature=1.0, combine="median")
    assert (mean.value, median.value) == (0.4, 0.2)
    assert mean.details["judge/agreement"] == 0.75 and mean.details["judge/std"] == pytest.approx(12**0.5)
    assert mean.details["judge/calls"] == 4


def test_judge_needs_more_than_half_of_the_votes(stub: JudgeStub) -> None:
    stub.answer = lambda number, body: Said("Score: 5" if number % 3 else "hm")
    assert [one.value for one in score(stub, "4", votes=3, temperature=1.0)] == [0.5]
    stub.answer = lambda number, body: Said("Score: 5" if number % 2 else "hm")
    (failed,) = score(stub, "4", votes=4, temperature=1.0)
    assert failed.value is None and failed.failure == "raised"


@for_each(
    ("said", "message"),
    [
        (Said("I like this."), "the answer has no score, neither {\"score\": 1} nor Score: 1: 'I like this.'"),
        (Said(None), "has no score"),
        (Said('{"score": 11}'), "the score 11 is not from 0 to 10"),
        (Said('{"score": NaN}'), "the score nan is not from 0 to 10"),
        (Said('{"reason": "Well', reason="length"), "raise max_tokens (in a recipe: reward.judge.max_tokens)"),
        (Said("The score is 10 if", reason="length"), "raise max_tokens (in a recipe: reward.judge.max_tokens)"),
    ],
)
def test_judge_counts_an_unreadable_answer_as_failure_with_an_example(said: Said, message: str) -> None:
    with judge_stub() as stub:
        stub.say(said)
        judge = Judge(settings(stub.url))
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("rl_plugins.rewards.judge").addHandler(handler)
        results = judge([request("a"), request("b")], DEADLINE_S)
        logging.getLogger("rl_plugins.rewards.judge").removeHandler(handler)
    for result in results:
        assert result is not None and result.value is None and message in result.message
        assert result.details["judge/calls"] == 1 and result.details["judge/tokens_in"] == 100
    assert len(records) == 1 and message in records[0]


def test_judge_reports_tokens_cost_retries_and_latency(stub: JudgeStub) -> None:
    stub.say(OVERLOADED, Said())
    (result,) = score(stub, "4", price_in=2.0, price_out=10.0)
    details = dict(result.details)
    assert details.pop("judge/latency_s") > 0
    assert details == {
        "judge/calls": 1.0, "judge/retries": 1.0, "judge/cached": 0.0, "judge/tokens_in": 100.0,
        "judge/tokens_out": 10.0, "judge/cost": pytest.approx(3e-4),
    }  # fmt: skip
    metrics = mean_details(
        [sum_details([result, result]), sum_details([Score(None, {"judge/cached": 1.0, "own": 2.0})])]
    )
    assert metrics["judge/tokens_in"] == 200.0 and metrics["judge/cost"] == pytest.approx(6e-4)
    assert metrics["judge/cached"] == pytest.approx(1 / 3) and metrics["rewards/own"] == 2.0


def test_judge_takes_answers_from_the_cache(stub: JudgeStub, tmp_path: Path) -> None:
    cache = {"cache": str(tmp_path), "votes": 2, "temperature": 1.0}
    stub.answer = lambda number, body: Said(f"Score: {number}")
    (first,) = score(stub, "4", **cache)
    (again,) = score(stub, "4", **cache)
    assert again.value == first.value == 0.15 and len(stub.requests) == 2
    assert again.details["judge/cached"] == 1.0 and again.details["judge/cost"] == again.details["judge/calls"] == 0
    for change in ({"temperature": 0.5}, {"template": "{response}"}, {"max_tokens": 5}, {"votes": 3}):
        before = len(stub.requests)
        score(stub, "4", **{**cache, **change})
        assert len(stub.requests) > before
    for answer in (Said("nothing"), Said("The score is 10 if", reason="length")):
        stub.say(answer)
        score(stub, "5", **cache)
        before = len(stub.requests)
        score(stub, "5", **cache)
        assert len(stub.requests) == before + 2, "an unreadable answer is not kept"


def test_judge_that_is_away_fails_samples_and_scores_none_0(stub: JudgeStub) -> None:
    stub.say(OVERLOADED)
    scorer = InlineScorer({"_target_": TARGET, "config": settings(stub.url, wait_s=0.3)}, deadline_s=DEADLINE_S)
    results = scorer.answer([request("a"), request("b")])
    assert [(one.value, one.failure) for one in results] == [(None, "timeout")] * 2
    with pytest.raises(RewardError, match=r"2 of 2 rewards failed.*timeout.*status 503"):
        scorer.score([request("a"), request("b")])


def test_judge_ends_before_the_deadline_of_the_call(stub: JudgeStub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.say(Said(hangs=True))
    # Only the judge knows the deadline of one second: a slow machine cannot reach the deadline of the call first.
    monkeypatch.setattr(judge_module, "run_concurrently", lambda calls, _: run_concurrently(calls, DEADLINE_S))
    (result,) = Judge(settings(stub.url))([request()], 1.0)
    assert result is not None and result.failure == "timeout" and "does not answer within" in result.message


def test_judge_is_a_class_or_an_instance_in_python(stub: JudgeStub) -> None:
    config = settings(stub.url)
    for reward in ({"_target_": rl.Judge, "config": config}, {"_target_": rl.Judge(config)}):
        assert [one.value for one in InlineScorer(reward, deadline_s=DEADLINE_S).score([request()])] == [0.8]


def test_judge_is_a_part_of_a_sum(stub: JudgeStub) -> None:
    parts = {
        "judge": {"_target_": TARGET, "config": {"url": stub.url, "model": "judge"}},
        "exact": {"_target_": "rl_plugins.rewards.scorers.exact_match"},
    }
    scorer = InlineScorer({"_target_": "rl_plugins.rewards.mixing.WeightedSum", "rewards": parts})
    (result,) = scorer.score([request("four")])
    assert result.value == 1.8 and result.details["judge/calls"] == 1.0


@for_each(
    ("options", "message"),
    [
        ({}, "url of JudgeConfig (in a recipe: reward.judge.url) is missing: a judge needs url"),
        ({"url": "http://h/v1"}, "model of JudgeConfig (in a recipe: reward.judge.model) is missing"),
        (
            {"url": "http://h/v1", "modle": "m"},
            "(in a recipe: reward.judge): modle: a judge has no such option: did you mean",
        ),
        (
            {"url": "h:80", "model": "m"},
            "config of the judge (in a recipe: reward.judge): url=h:80: must be an address",
        ),
        ({"url": "http://h/v1", "model": "m", "key_variable": "NO_KEY"}, "the environment has no such variable"),
        ({"url": "http://h/v1", "model": "m", "template_file": "/no/file"}, "template_file=/no/file: the file cannot"),
    ],
)
def test_judge_refuses_wrong_options_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        InlineScorer({"_target_": TARGET, "config": options})
    assert message in str(caught.value)


def test_judge_checks_the_text_of_a_template_file(tmp_path: Path) -> None:
    file = tmp_path / "rubric.txt"
    for content, message in ((b"{respnse}", "did you mean {response}"), (b"hi", "add {response}"), (b"\xff", "UTF-8")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            Judge(settings("http://h/v1", template_file=str(file)))


def test_judge_refuses_a_key_that_is_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("sk\u00e9", "a\nb", "  "):
        monkeypatch.setenv("JUDGE_API_KEY", key)
        with pytest.raises(ConfigError, match="JUDGE_API_KEY") as caught:
            Judge(settings("http://h/v1", key_variable="JUDGE_API_KEY"))
        assert key.strip() == "" or key not in str(caught.value)


def test_judge_shares_the_limits_between_processes() -> None:
    judge = Judge(settings("http://h/v1", requests_per_minute=60.0, concurrent_requests=8), processes=4)
    assert [(one._limits.per_minute, one._limits.concurrent) for one in judge._servers] == [(15.0, 2)]
    judge = Judge(settings("http://h/v1", concurrent_requests=1), processes=4)
    assert [(one._limits.per_minute, one._limits.concurrent) for one in judge._servers] == [(math.inf, 1)]


def test_judge_asks_the_engines_of_the_run_with_their_key(
    stub: JudgeStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENGINE_KEY, KEY)
    config = JudgeConfig(
        model="folder", votes=2, temperature=1.0, requests_per_minute=6000.0, concurrent_requests=8,
        cache=str(tmp_path),
    )  # fmt: skip
    with judge_stub() as second:
        rewards = with_engines(with_judges({"_target_": TARGET}, config, 1), [stub.url, second.url], "copy")
        with RewardPool(rewards, num_workers=1, deadline_s=DEADLINE_S) as pool:
            scores = pool.score([request(str(number)) for number in range(16)])
        asked = [one for server in (stub, second) for one in server.requests]
        questions = [{one["messages"][0]["content"] for one in server.requests} for server in (stub, second)]
    assert {one.value for one in scores} == {0.8}
    assert len(asked) == 32 and {(one["key"], one["model"]) for one in asked} == {(f"Bearer {KEY}", "copy")}
    # Both engines have work, and all votes of a question ask one engine.
    assert all(questions) and not questions[0] & questions[1]
    judge = Judge(config, urls=[stub.url, "http://another/v1"])
    assert [(one._limits.per_minute, one._limits.concurrent) for one in judge._servers] == [(3000.0, 4)] * 2


def test_reward_workers_get_the_key_of_a_judge_and_no_other_secret(
    stub: JudgeStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    monkeypatch.setenv("OTHER_API_KEY", "other")
    (tmp_path / "mine.py").write_text("import os\ndef f(solution_str): return float('OTHER_API_KEY' in os.environ)")
    config = settings(stub.url, key_variable="JUDGE_API_KEY", cache=str(tmp_path / "cache"))
    rewards = {"default": {"_target_": TARGET}, "own": {"path": str(tmp_path / "mine.py"), "name": "f"}}
    rewards = with_judges(rewards, config, 1)
    own = request().__class__("own", "a", "", {})
    with RewardPool(rewards, num_workers=1, deadline_s=DEADLINE_S) as pool:
        results = pool.score([request("a"), own, request("b")])
        assert [one.value for one in results] == [0.8, 0.0, 0.8] and KEY not in repr(pool._workers[0].task)
    assert {one["key"] for one in stub.requests} == {f"Bearer {KEY}"}
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@for_each(
    ("said", "message"),
    [
        (Said(status=401, body=f"wrong key {KEY}"), "the status 401 (wrong key ***): set key_variable"),
        (Said(status=404, body="no model"), "the status 404 (no model): give the address up to /v1"),
        (Said("Nice."), "the answer has no score"),
    ],
)
def test_reward_trial_tells_a_refusal_of_the_judge_in_one_line(said: Said, message: str) -> None:
    with judge_stub() as stub, pytest.MonkeyPatch.context() as environment:
        environment.setenv("JUDGE_API_KEY", KEY)
        stub.say(said)
        rewards = {"_target_": TARGET, "config": settings(stub.url, key_variable="JUDGE_API_KEY")}
        trial_of = RewardTrial(rewards, deadline_s=DEADLINE_S, load_timeout_s=DEADLINE_S)
        with trial_of as trial, pytest.raises(ConfigError) as caught:
            trial.score(request())
    text = str(caught.value)
    assert "the reward fails on a sample of data_source 'sums'" in text and message in text
    assert "\n" not in text and KEY not in text


def test_trial_deadline_s_has_time_for_an_answer() -> None:
    rewards = {"default": {"_target_": TARGET, "config": JudgeConfig(timeout_s=60)}}
    assert trial_deadline_s(rewards, 900.0) == 90.0
    assert trial_deadline_s({"default": {"_target_": "a.b"}}, 900.0) == 10.0
    assert trial_deadline_s(rewards, 5.0) == 5.0


def test_judge_counts_no_vote_without_a_turn_to_ask_as_cached(stub: JudgeStub) -> None:
    judge = Judge(settings(stub.url, requests_per_minute=1.0))
    results = judge([request("a"), request("b")], 1.0)
    assert sorted(result.details["judge/cached"] for result in results if result is not None) == [0.0, 0.0]
