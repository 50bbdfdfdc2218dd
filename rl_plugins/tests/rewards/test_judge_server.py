"""JudgeServer against a real server: repetition, limits of requests, and the wait for a server that is away."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plugins.rewards import judge_server
from rl_plugins.rewards.judge_server import JudgeReply, JudgeServer, NoAnswer, RequestLimits
from rl_plugins.tests.patience import patient
from rl_plugins.tests.rewards.judge_stub import KEY, OVERLOADED, JudgeStub, Said, judge_stub

BODY = {"model": "judge", "messages": []}

pytestmark = pytest.mark.usefixtures("short_delays")


def ask(url: str, *, questions: int = 1, time_s: float = 60.0, key: str | None = None, **limits: Any) -> list[Any]:
    """Return the reply or the exception of each question."""

    async def run() -> list[Any]:
        server, stop = JudgeServer(url, key, RequestLimits(**limits)), time.monotonic() + patient(time_s)
        return await asyncio.gather(*(server.ask(BODY, stop) for _ in range(questions)), return_exceptions=True)

    return asyncio.run(run())


def failure(url: str, **options: Any) -> NoAnswer:
    """Return the failure of one question."""
    (outcome,) = ask(url, **options)
    assert isinstance(outcome, NoAnswer)
    return outcome


def test_ask_sends_the_body_and_the_key_to_the_endpoint(stub: JudgeStub) -> None:
    for url in (stub.url, f"{stub.url}/", f"{stub.url}/chat/completions"):
        (reply,) = ask(url, key=KEY)
        assert isinstance(reply, JudgeReply) and reply.requests == 1 and reply.seconds > 0
        assert (reply.answer.tokens_in, reply.answer.tokens_out, reply.answer.was_cut) == (100, 10, False)
    assert stub.requests == [{"path": "/v1/chat/completions", "key": f"Bearer {KEY}", **BODY}] * 3
    ask(stub.url)
    assert stub.requests[-1]["key"] is None


def test_ask_repeats_faults_up_to_the_number_of_retries(stub: JudgeStub) -> None:
    stub.say(Said(status=500, body="oh"), Said(body="no JSON"), Said(body='{"choices": []}'), Said())
    (reply,) = ask(stub.url, retries=3)
    assert reply.requests == 4
    stub.say(Said(status=500, body="oh"))
    error = failure(stub.url, retries=2)
    assert (error.requests, error.is_late) == (3, False)
    assert str(error) == f"{stub.url}/chat/completions answers with the status 500 (oh), the last of 3 requests"


def test_ask_waits_as_long_as_retry_after_with_all_questions(stub: JudgeStub) -> None:
    stub.answer = lambda number, body: (
        Said(status=429, body="slow", headers={"Retry-After": "1"}) if number == 1 else Said()
    )
    started = time.monotonic()
    (reply,) = ask(stub.url)
    assert reply.requests == 2 and time.monotonic() - started >= 1
    for text, least in {"soon": 0.0, "Thu, 01 Jan 1970 00:00:00 GMT": 0.0, "nan": 0.0, "1e9": 60.0}.items():
        server = JudgeServer(stub.url, None, RequestLimits(wait_s=60.0))
        assert server._retry_after_s(type("R", (), {"headers": {"Retry-After": text}})()) == least


def test_ask_refuses_at_once_and_names_the_way_out(stub: JudgeStub) -> None:
    for status, way_out in {
        401: "set key_variable (in a recipe: reward.judge.key_variable)", 403: "with a key for this model",
        404: "up to /v1 as url", 400: "set response_format to none", 413: "correct the options of JudgeConfig",
    }.items():  # fmt: skip
        stub.requests.clear()
        stub.say(Said(status=status, body=f"Incorrect key {KEY}:\n" + "x" * 1000))
        error = failure(stub.url, key=KEY)
        assert len(stub.requests) == 1 and not error.is_late
        assert f"the status {status} (Incorrect key ***: xxx" in str(error) and way_out in str(error)
        assert KEY not in str(error) and "\n" not in str(error) and len(str(error)) < 480


def test_ask_ends_a_hanging_request_and_repeats(stub: JudgeStub) -> None:
    stub.say(Said(hangs=True), Said())
    (reply,) = ask(stub.url, timeout_s=1.0)
    assert reply.requests >= 2
    stub.say(Said(hangs=True))
    assert "does not answer within 0.2 s" in str(failure(stub.url, timeout_s=0.2, retries=1))


def test_ask_waits_for_a_server_that_starts_later(caplog: pytest.LogCaptureFixture) -> None:
    stub, started = JudgeStub(), threading.Event()
    outcomes: list[Any] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Waiting for the judge" in record.getMessage():
                started.set()

    watch = Watch()
    judge_server.logger.addHandler(watch)
    thread = threading.Thread(target=lambda: outcomes.extend(ask(stub.url, questions=3)))
    try:
        with caplog.at_level(logging.WARNING):
            thread.start()
            assert started.wait(patient(30))
            with judge_stub(stub):
                thread.join(patient(30))
    finally:
        judge_server.logger.removeHandler(watch)
    assert all(isinstance(outcome, JudgeReply) and outcome.requests > 1 for outcome in outcomes) and len(outcomes) == 3
    waits = [record.getMessage() for record in caplog.records]
    assert len(waits) == 2, waits
    assert (
        "cannot be reached" in waits[0]
        and "(wait_s=600, in a recipe: reward.judge.wait_s)" in waits[0]
        and "answers again" in waits[1]
    )


def test_ask_gives_up_when_the_common_wait_is_over(stub: JudgeStub) -> None:
    stub.say(OVERLOADED)

    async def run() -> list[tuple[float, int]]:
        server, found = JudgeServer(stub.url, None, RequestLimits(wait_s=1.5)), []
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(NoAnswer, match=r"status 503 \(busy\)") as caught:
                await server.ask(BODY, math.inf)
            assert caught.value.is_late
            found.append((time.monotonic() - started, caught.value.requests))
        stub.say(Said())
        await server.ask(BODY, math.inf)
        stub.say(OVERLOADED, OVERLOADED, Said())
        stub.requests.clear()
        # The wait begins again after an answer.
        patient_server = JudgeServer(stub.url, None, RequestLimits(wait_s=patient(60)))
        assert (await patient_server.ask(BODY, math.inf)).requests == 3
        return found

    (first_s, first), *later = asyncio.run(run())
    assert first_s >= 1.5 and first > 1
    assert [requests for _, requests in later] == [1, 1], "the wait is common to all questions"


def test_ask_does_not_count_time_without_questions_as_absence(stub: JudgeStub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.say(OVERLOADED)
    limits = RequestLimits(wait_s=1.0, timeout_s=5.0)

    async def run() -> int:
        server = JudgeServer(stub.url, None, limits)
        with pytest.raises(NoAnswer):
            await server.ask(BODY, math.inf)
        # A long training step.
        now = time.monotonic
        monkeypatch.setattr("rl_plugins.rewards.judge_server.time", SimpleNamespace(monotonic=lambda: now() + 3600))
        stub.say(OVERLOADED, Said())
        stub.requests.clear()
        return (await server.ask(BODY, math.inf)).requests

    assert asyncio.run(run()) == 2


def test_ask_gives_up_before_the_deadline(stub: JudgeStub) -> None:
    stub.say(OVERLOADED)
    (outcome,) = ask(stub.url, time_s=0.1)
    assert isinstance(outcome, NoAnswer) and outcome.is_late


def test_ask_keeps_the_number_of_requests_per_minute(stub: JudgeStub) -> None:
    started = time.monotonic()
    ask(stub.url, questions=5, per_minute=1200)
    assert time.monotonic() - started >= 4 * 60 / 1200
    slow = ask(stub.url, questions=3, per_minute=1e-3, time_s=30)
    assert [isinstance(outcome, JudgeReply) for outcome in slow].count(True) == 1
    said = [str(outcome) for outcome in slow if isinstance(outcome, NoAnswer)]
    assert all("requests_per_minute (in a recipe: reward.judge.requests_per_minute)" in text for text in said)


def test_ask_keeps_the_number_of_concurrent_requests(stub: JudgeStub) -> None:
    stub.together = threading.Barrier(3)
    assert len(ask(stub.url, questions=9, concurrent=3)) == 9
    assert stub.most_open == 3


def test_ask_connects_again_in_a_new_event_loop(stub: JudgeStub) -> None:
    server = JudgeServer(stub.url, None, RequestLimits())
    for _ in range(2):
        assert asyncio.run(server.ask(BODY, math.inf)).requests == 1
