"""Records of scoring: requests, scores, and the failures among the scores.

A stage sends a `ScoringRequest` for each response and receives one `Score` for each request. The result of a reward
function is read strictly. A result becomes a finite number, a reply of an environment, or a recorded failure.
Failures are counted for the metrics, and too many failures end the run.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rl_plugins.errors import RewardError
from rl_plugins.redaction import redacted
from rl_plugins.user_code import describe

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Failure = Literal["raised", "timeout", "not_finite", "died", "memory", "image"]

_LARGEST = 1e18
"""Largest number whose square, summed over the samples of a step, is a float32."""
_ALLOWED_FAILURES = 10
"""Number of failures in a few samples that say nothing about their share."""
JUDGE_DETAILS = "judge/"
"""Start of the names of details about a judge."""
AGENT_DETAILS = "agent/"
"""Start of the names of details about an agent."""
SUMMED_DETAILS = frozenset({
    *(f"{JUDGE_DETAILS}{name}" for name in ("calls", "retries", "tokens_in", "tokens_out", "cost")),
    *(f"{AGENT_DETAILS}{name}" for name in ("refused", "not_continued", "malformed", "without_call")),
})  # fmt: skip
"""Details whose metric is the sum over samples. The metric of all other details is the mean."""
_MESSAGE_LIMIT = 500


@dataclass(frozen=True)
class ScoringRequest:
    """One response to score. A reward function names its arguments as in docs/rewards.md.

    Attributes:
        data_source: name of the prompt's data set. The name selects the reward.
        solution_str: text of the response, without the prompt.
        ground_truth: value of `reward_model["ground_truth"]` in the row, as stored.
        extra_info: value of `extra_info` in the row.
        prompt: messages of the prompt (list of {role, content}), or None.
        turns: messages between the prompt and the response, if the response is not the first of a conversation.
        turns_left: number of responses still allowed to the policy. With 0, the reward must return a score.
        token_ids: ids of all tokens that the policy sampled, in a conversation of all turns. None for a text without
            tokens. A stage gives an array, which is made and sent in an eighth of the time of a list; a reward function
            that asks for the ids gets a list.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    prompt: Sequence[Message] | None = None
    turns: Sequence[Message] = ()
    turns_left: int = 0
    token_ids: Sequence[int] | None = None

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, with the response as the last message."""
        return [*(self.prompt or ()), *self.turns, {"role": "assistant", "content": self.solution_str}]


def scoring_request(response: str, row: Mapping[str, Any], token_ids: Sequence[int] | None = None) -> ScoringRequest:
    """Return the request to score a response to the prompt of a row."""
    ground_truth = (row["reward_model"] or {}).get("ground_truth")
    return ScoringRequest(
        row["data_source"], response, ground_truth, row["extra_info"] or {}, row["prompt"], token_ids=token_ids
    )


@dataclass(frozen=True)
class Score:
    """Outcome of one request: a finite value, a reply, or a failure. A failure is never a value of 0.

    Attributes:
        value: the reward. None exactly if `failure` or `reply` is set.
        details: further finite numbers in the result of the reward function, beside "score".
        failure: "raised" (an exception, or a result of the wrong type or length), "timeout", "not_finite", or
            "died" (the worker process ended), "memory" (no memory was left to the worker), or "image" (an image of the
            prompt became bad after the start).
        message: for a failure: the exception, or the fault of the result.
        reply: message of an environment to the policy. The policy responds again before there is a value.
        reward: reward of the turn before a reply.
        token_rewards: one reward for each token that the policy sampled, in a conversation for all turns; None for a
            reward without rewards of tokens. The last token also gets the rest of `value`.
    """

    value: float | None
    details: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""
    reply: Message | None = None
    reward: float = 0.0
    token_rewards: Sequence[float] | None = None


def failed(failure: Failure, message: str) -> Score:
    """Return the score of a failure, with the message cut at 500 characters."""
    return Score(value=None, failure=failure, message=message[:_MESSAGE_LIMIT])


def finite_score(value: float, details: Mapping[str, float], token_rewards: Sequence[float] | None = None) -> Score:
    """Return the score of a conversation from the sum of its rewards. The sum of finite rewards may be infinite."""
    if not math.isfinite(value):
        return failed("not_finite", f"the sum of the rewards is {value}")
    return Score(value, details, token_rewards=token_rewards)


def for_tokens(score: Score, num_tokens: int | None, name: str = "the environment") -> Score:
    """Return a score, or a failure if the number of its rewards of tokens is wrong.

    Args:
        score: the score.
        num_tokens: number of tokens that the policy sampled. None for a text without tokens.
        name: name of the reward, for the message.
    """
    if score.token_rewards is None or num_tokens in (None, len(score.token_rewards)):
        return score
    return without_value(
        score,
        f"{name}: 'token_rewards' has {len(score.token_rewards)} numbers for {num_tokens} sampled tokens: return one "
        "number for each token that the policy sampled, in a conversation for the tokens of all turns",
    )


def both_kinds(score: Score, name: str = "the environment") -> Score:
    """Return the failure of a conversation with rewards of turns and rewards of tokens."""
    return without_value(
        score, f"{name}: the conversation has rewards of turns and 'token_rewards': return one of the two kinds"
    )


def without_value(score: Score, message: str) -> Score:
    """Return the failure of a wrong result in place of a score, with the details of the score."""
    return Score(None, score.details, "raised", message[:_MESSAGE_LIMIT])


def read_scores(outcome: object, name: str, batch: int | None) -> list[Score]:
    """Turn the outcome of one call into scores.

    Args:
        outcome: result of the reward function, or the exception it raised. A result is a number (also a 0-d array or
            tensor), a mapping with "score" and further numbers, or a reply, which may have the "reward" of the turn.
            Further texts in a mapping are left out. A mapping may have "token_rewards", whose sum is the score unless
            there is a "score". A batched call returns a list of results.
        name: name of the reward, for messages.
        batch: number of samples of a batched call. None for a call with one sample.
    """
    if isinstance(outcome, BaseException):
        return [failed("raised", f"{name}: {describe(outcome)}")] * (batch or 1)
    if batch is None:
        return [read_score(outcome, name)]
    results = outcome.tolist() if hasattr(outcome, "tolist") else outcome
    if not isinstance(results, list | tuple):
        return [failed("raised", f"{name}: a batched reward returns a list, not {_type(results)}")] * batch
    if len(results) != batch:
        return [failed("raised", f"{name}: returned {len(results)} results for {batch} samples")] * batch
    return [read_score(result, name) for result in results]


def read_score(result: object, name: str) -> Score:
    """Turn the result of a call for one sample into a score; see `read_scores`."""
    if isinstance(result, str):
        return Score(None, reply={"role": "user", "content": result})
    if isinstance(result, Mapping) and {"role", "content"} <= result.keys():
        if not isinstance(result["content"], str):
            return failed("raised", f"{name}: the content of the reply is {_type(result['content'])}, not text")
        if result.get("token_rewards") is not None:
            return failed(
                "raised",
                f"{name}: a reply has 'token_rewards': return the rewards of the tokens of all turns with the score",
            )
        of_turn = read_score({"score": result.get("reward", 0.0)}, f"{name}: reward")
        message = {key: value for key, value in result.items() if key != "reward"}
        return of_turn if of_turn.value is None else Score(None, reply=message, reward=of_turn.value)
    values: dict[Any, Any] = dict(result) if isinstance(result, Mapping) else {"score": result}
    token_rewards: tuple[float, ...] | None = None
    if (given := values.pop("token_rewards", None)) is not None:
        read = _token_rewards(given, name)
        if isinstance(read, Score):
            return read
        token_rewards = read
        if values.get("score") is None:
            values["score"] = sum(token_rewards)
    if "score" not in values:
        return failed("raised", f"{name}: the returned mapping has no 'score', only {list(map(str, values))}")
    numbers = {}
    for key, value in values.items():
        # Functions for verl also return texts, such as the found answer under `pred`.
        if key != "score" and (value is None or isinstance(value, str)):
            continue
        number = _number(value, name, str(key), largest=_LARGEST if key == "score" else sys.float_info.max)
        if isinstance(number, Score):
            return number
        numbers[str(key)] = number
    return Score(value=numbers.pop("score"), details=numbers, token_rewards=token_rewards)


def _token_rewards(given: object, name: str) -> tuple[float, ...] | Score:
    """Read the rewards of tokens: finite numbers in a list, array or tensor; return a failure for all else."""
    numbers = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(numbers, Sequence) or isinstance(numbers, str | bytes):
        return failed("raised", f"{name}: 'token_rewards' is {_type(given)}, not a list of numbers")
    read = []
    for place, value in enumerate(numbers):
        number = _number(value, name, "token_rewards", place)
        if isinstance(number, Score):
            return number
        read.append(number)
    return tuple(read)


def _number(value: Any, name: str, key: str, token: int | None = None, *, largest: float = _LARGEST) -> float | Score:
    """Read a finite number, also of a 0-d array or tensor; return a failure for all else.

    Args:
        value: the value.
        name: name of the reward, for messages.
        key: key of the value in the result of the reward.
        token: place of the token with the value, if the key has a value for each token.
        largest: largest value.
    """
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(number, int | float) and abs(number) <= largest:
        return float(number)
    subject = f"{name}: {key!r}" if token is None else f"{name}: {key!r} of token {token}"
    if not isinstance(number, int | float):
        return failed("raised", f"{subject} is {_type(number)}, not a number")
    is_large = isinstance(number, int) or math.isfinite(number)
    shown = f"too large: training takes numbers up to {largest:g}" if is_large else number
    return failed("not_finite", f"{subject} is {shown}")


def _type(value: object) -> str:
    return f"of type {type(value).__name__}"


def failure_counts(scores: Sequence[Score]) -> dict[str, int]:
    """Count the failures of each kind. Every kind is a key, so that all ranks log the same metrics."""
    counts = Counter(score.failure for score in scores)
    return {kind: counts[kind] for kind in get_args(Failure)}


class FailureRate:
    """Share of failed samples over the calls of a scorer.

    One call of one rank can have a few samples, of which one failure may be a tenth. So a call is judged together with
    the calls before, over at least `10 / max_failure_rate` samples. Ten failures are allowed, but none if
    `max_failure_rate` is 0.

    Args:
        max_failure_rate: largest allowed share of failed samples, 0 to 1.
    """

    def __init__(self, max_failure_rate: float) -> None:
        self._largest, self._allowed = max_failure_rate, _ALLOWED_FAILURES if max_failure_rate else 0
        # Failures and samples of each call.
        self._calls: deque[tuple[int, int]] = deque()
        self._logged = set[str]()

    def check(self, scores: Sequence[Score | None]) -> None:
        """Raise a RewardError if too many samples failed in this call and the calls before.

        Args:
            scores: one entry per sample of this call. None for a sample without a score, which counts as not failed.
        """
        failures = _failures_among(scores)
        count = len(failures) + sum(failed for failed, _ in self._calls)
        total = len(scores) + sum(size for _, size in self._calls)
        if failures and count > max(self._largest * total, self._allowed):
            raise too_many(failures, count, total, self._largest)

    def add(self, scores: Sequence[Score | None]) -> None:
        """Check the scores of a finished call as `check` does, and keep their numbers for the next calls.

        The log gets the first failure of each kind.
        """
        self.check(scores)
        failures = _failures_among(scores)
        for score in failures:
            if (kind := str(score.failure)) not in self._logged:
                self._logged.add(kind)
                logger.warning("a reward failed (%s): %s", kind, redacted(score.message))
        self._calls.append((len(failures), len(scores)))
        while sum(size for _, size in self._calls) - self._calls[0][1] >= _ALLOWED_FAILURES / (self._largest or 1):
            self._calls.popleft()


def _failures_among(scores: Sequence[Score | None]) -> list[Score]:
    return [score for score in scores if score is not None and score.failure is not None]


def too_many(failures: Sequence[Score], count: int, total: int, max_failure_rate: float) -> RewardError:
    """Return the error with both numbers, and the most frequent failure with one example."""
    kind, of_kind = Counter(score.failure for score in failures).most_common(1)[0]
    example = next(score.message for score in failures if score.failure == kind)
    return RewardError(
        f"{count} of {total} rewards failed, more than max_failure_rate={max_failure_rate:g} allows; most often: "
        f"{kind} ({of_kind} times), for example: {example}. Correct the reward, or raise max_failure_rate"
    )
