"""Requests to a server with OpenAI's protocol: limits of requests, repetition, and the wait for a server that is away.

A failed try is one of three kinds. A refusal (a status such as 401 or 404) stays a refusal, so there is no further try.
A fault (a timeout, a status such as 500, an answer in another form) may belong to one question, so the number of tries
is limited. A server that is away (no connection; the status 429, 502, 503 or 504) comes back for all questions, so the
time is limited, counted from the first failure after an answer. All delays grow exponentially, with a random part, and
are at least as long as the server's `Retry-After`.

The client of OpenAI does not replace this module. Its repetitions pass by the limit of requests per minute, know no
common wait of all questions, and do not tell their number.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from rl_plugins.redaction import REMOVED
from rl_plugins.rewards.judge_answers import JudgeAnswer

if TYPE_CHECKING:
    import httpx2

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_CONNECT_S = 10.0
_LOG_S = 30.0
_AWAY = (429, 502, 503, 504)
_SHOWN = 200
_ENDPOINT = "/chat/completions"
_WAYS_OUT = {
    401: "set key_variable (in a recipe: reward.judge.key_variable) to the name of the environment variable with the "
    "key",
    403: "set key_variable (in a recipe: reward.judge.key_variable) to the name of the environment variable with a key "
    "for this model",
    404: "give the address up to /v1 as url, and a model of the server as model (in a recipe: reward.judge.url and "
    "reward.judge.model)",
    400: "if the server does not know a field of the request, set response_format to none, or the field in request to "
    "null (in a recipe: reward.judge.response_format, reward.judge.request)",
}
_OTHER_WAY_OUT = "correct the options of JudgeConfig (in a recipe: reward.judge)"

Kind = Literal["refused", "fault", "away"]


class NoAnswer(Exception):
    """A question without an answer.

    Attributes:
        is_late: True if the time is over, False if a further try would have the same end.
        requests: number of requests for the question.
    """

    def __init__(self, message: str, *, is_late: bool, requests: int) -> None:
        super().__init__(message)
        self.is_late, self.requests = is_late, requests


@dataclass(frozen=True)
class JudgeReply:
    """Answer to a question.

    Attributes:
        answer: the answer.
        requests: number of requests.
        seconds: duration of the last request.
    """

    answer: JudgeAnswer
    requests: int
    seconds: float


@dataclass(frozen=True)
class _Failure:
    kind: Kind
    reason: str
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the requests of this process.

    Attributes:
        timeout_s: seconds for one answer.
        retries: further tries after a fault.
        wait_s: seconds for which all questions wait for a server that is away.
        per_minute: largest number of requests in a minute.
        concurrent: largest number of requests at a time.
    """

    timeout_s: float = 60.0
    retries: int = 4
    wait_s: float = 600.0
    per_minute: float = math.inf
    concurrent: int = 32


class _Connection:
    """Client, and state of the limits, in one event loop."""

    def __init__(self, client: httpx2.AsyncClient, concurrent: int) -> None:
        self.loop, self.client = asyncio.get_running_loop(), client
        self.places, self.turn = asyncio.Semaphore(concurrent), asyncio.Lock()


class JudgeServer:
    """A server with OpenAI's protocol. Coroutines of one thread may ask at the same time.

    Args:
        url: address up to `/v1`, or with `/chat/completions`.
        key: key of the server; None sends no key. The key is in no message.
        limits: limits of requests.
    """

    def __init__(self, url: str, key: str | None, limits: RequestLimits) -> None:
        parts = urlsplit(url)
        path = parts.path.rstrip("/").removesuffix(_ENDPOINT)
        self.url = urlunsplit(parts._replace(path=path + _ENDPOINT, fragment=""))
        self._key, self._limits = key, limits
        self._connection: _Connection | None = None
        self._random = random.Random()
        self._next_start = self._next_log = 0.0
        self._away_since: float | None = None
        # Time until which a question repeats its request.
        self._away_until = 0.0

    async def ask(self, body: Mapping[str, Any], stop: float) -> JudgeReply:
        """Send a question until there is an answer.

        Args:
            body: body of the request, as plain values.
            stop: end of the time for the answer, in seconds of `time.monotonic`.

        Raises:
            NoAnswer: the server refuses the question, or there is no answer in time.
        """
        requests = faults = 0
        while True:
            connection = self._connect()
            async with connection.places:
                await self._wait_for_turn(connection, stop, requests)
                requests, started = requests + 1, time.monotonic()
                outcome = await self._post(connection.client, body, min(self._limits.timeout_s, stop - started))
            if isinstance(outcome, JudgeAnswer):
                self._note_presence()
                return JudgeReply(outcome, requests, time.monotonic() - started)
            delay_s = self._delay_s(requests, outcome)
            if outcome.kind == "away":
                left_s = self._note_absence(outcome.reason)
                is_over, delay_s = left_s <= 0, min(delay_s, left_s)
                self._away_until = time.monotonic() + delay_s + self._limits.timeout_s
            else:
                self._note_presence()
                faults += 1
                is_over = outcome.kind == "refused" or faults > self._limits.retries
            if is_over or time.monotonic() + delay_s >= stop:
                raise NoAnswer(
                    f"{self.url} {outcome.reason}{_times(requests)}",
                    is_late=outcome.kind == "away" or not is_over,
                    requests=requests,
                )
            await asyncio.sleep(delay_s)

    async def _wait_for_turn(self, connection: _Connection, stop: float, requests: int) -> None:
        async with connection.turn:
            while (start := self._next_start) > time.monotonic():
                if start >= stop:
                    raise NoAnswer(
                        f"{self.url} was not asked in time: requests_per_minute (in a recipe: "
                        "reward.judge.requests_per_minute), or Retry-After of the server, allows the next request in "
                        f"{start - time.monotonic():.0f} s: raise deadline_s of the rewards (in a recipe: "
                        "reward.deadline_s)",
                        is_late=True,
                        requests=requests,
                    )
                await asyncio.sleep(start - time.monotonic())
            if time.monotonic() >= stop:
                raise NoAnswer(
                    f"{self.url} was not asked in time: other questions took all of deadline_s of the rewards (in a "
                    "recipe: reward.deadline_s)",
                    is_late=True,
                    requests=requests,
                )
            self._next_start = time.monotonic() + 60.0 / self._limits.per_minute

    async def _post(
        self, client: httpx2.AsyncClient, body: Mapping[str, Any], timeout_s: float
    ) -> JudgeAnswer | _Failure:
        import httpx2

        try:
            async with asyncio.timeout(timeout_s) as limit:
                response = await client.post(self.url, json=body)
        except (TimeoutError, httpx2.TimeoutException) as error:
            if isinstance(error, httpx2.ConnectTimeout):
                return _Failure("away", f"does not take a connection within {_CONNECT_S:g} s")
            if isinstance(error, TimeoutError) and not limit.expired():
                raise
            return _Failure("fault", f"does not answer within {timeout_s:.3g} s")
        except httpx2.TransportError as error:
            return _Failure("away", f"cannot be reached ({self._shown(str(error)) or type(error).__name__})")
        except httpx2.RequestError as error:
            return _Failure("fault", f"sends a damaged answer ({self._shown(str(error))})")
        if response.status_code == 200:
            return self._read(response)
        reason = f"answers with the status {response.status_code} ({self._shown(response.text)})"
        if response.status_code in _AWAY:
            return _Failure("away", reason, self._retry_after_s(response))
        if response.status_code >= 500 or response.status_code == 408:
            return _Failure("fault", reason, self._retry_after_s(response))
        return _Failure("refused", f"{reason}: {_WAYS_OUT.get(response.status_code, _OTHER_WAY_OUT)}")

    def _read(self, response: httpx2.Response) -> JudgeAnswer | _Failure:
        try:
            content = response.json()
            (choice, *_) = content["choices"]
            text = choice["message"].get("content") or ""
            usage = content.get("usage") or {}
            tokens_in, tokens_out = (int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return _Failure("fault", f"answers in another form than OpenAI's protocol ({self._shown(response.text)})")
        return JudgeAnswer(str(text), tokens_in, tokens_out, was_cut=choice.get("finish_reason") == "length")

    def _retry_after_s(self, response: httpx2.Response) -> float:
        """Return the seconds in the header Retry-After, a number or a date, at most `wait_s`; 0 without the header.

        All questions wait as long.
        """
        text = response.headers.get("Retry-After", "")
        try:
            seconds = float(text)
        except ValueError:
            try:
                seconds = parsedate_to_datetime(text).timestamp() - time.time()
            except (ValueError, TypeError):
                return 0.0
        seconds = min(max(0.0, seconds), self._limits.wait_s) if math.isfinite(seconds) else 0.0
        self._next_start = max(self._next_start, time.monotonic() + seconds)
        return seconds

    def _delay_s(self, requests: int, failure: _Failure) -> float:
        delay_s = min(FIRST_DELAY_S * 2.0 ** min(requests - 1, 30), _LONGEST_DELAY_S) * self._random.uniform(0.5, 1.0)
        return max(delay_s, failure.retry_after_s)

    def _note_absence(self, reason: str) -> float:
        """Remember that the server is away, and log the wait at intervals; return the seconds left for the wait."""
        now = time.monotonic()
        if self._away_since is None or now > self._away_until:
            self._away_since, self._next_log = now, now
        left_s = self._away_since + self._limits.wait_s - now
        if left_s > 0 and now >= self._next_log:
            logger.warning(
                "Waiting for the judge: %s %s. The run waits for %.0f s more (wait_s=%g, in a recipe: "
                "reward.judge.wait_s)",
                self.url, reason, left_s, self._limits.wait_s,
            )  # fmt: skip
            self._next_log = now + _LOG_S
        return left_s

    def _note_presence(self) -> None:
        if self._away_since is not None:
            logger.warning("The judge answers again, after %.0f s: %s", time.monotonic() - self._away_since, self.url)
            self._away_since = None

    def _connect(self) -> _Connection:
        """Return the connection in the running event loop. A client does not outlive its event loop."""
        if self._connection is None or self._connection.loop is not asyncio.get_running_loop():
            import httpx2

            headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
            number = self._limits.concurrent
            client = httpx2.AsyncClient(
                headers=headers,
                timeout=httpx2.Timeout(self._limits.timeout_s, connect=_CONNECT_S, pool=None),
                limits=httpx2.Limits(max_connections=number, max_keepalive_connections=number),
            )
            self._connection = _Connection(client, number)
        return self._connection

    def _shown(self, text: str) -> str:
        """Return the start of a text of the server in one line, without the key."""
        if self._key is not None:
            text = text.replace(self._key, REMOVED)
        line = " ".join(text.split())
        return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _times(requests: int) -> str:
    return "" if requests == 1 else f", the last of {requests} requests"
