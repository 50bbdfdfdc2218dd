"""Records of scoring: requests, scores, and the failures among the scores.

A stage sends a `ScoringRequest` for each response and receives one `Score` for each request. The result of a reward
function is read strictly. A result becomes a finite number, a reply of an environment, or a recorded failure.
Failures are counted for the metrics, and too many failures end the run.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rl_plugins.errors import RewardError
from rl_plugins.user_code import describe

Message = Mapping[str, Any]
Failure = Literal["raised", "timeout", "not_finite", "died", "memory"]

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
    """One response to score. A reward function asks for its arguments by the names of these fields.

    Attributes:
        data_source: Name of the prompt's data set. The name selects the reward.
        solution_str: Text of the response, without the prompt.
        ground_truth: Value of `reward_model["ground_truth"]` in the row, as stored.
        extra_info: Value of `extra_info` in the row.
        prompt: Messages of the prompt (list of {role, content}), or None.
        turns: Messages between the prompt and the response, if the response is not the first of a conversation.
        turns_left: Number of responses still allowed to the policy. With 0, the reward must return a score.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    prompt: Sequence[Message] | None = None
    turns: Sequence[Message] = ()
    turns_left: int = 0

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, with the response as the last message."""
        return [*(self.prompt or ()), *self.turns, {"role": "assistant", "content": self.solution_str}]


@dataclass(frozen=True)
class Score:
    """Outcome of one request: a finite value, a reply, or a failure. A failure is never a value of 0.

    Attributes:
        value: The reward. None exactly if `failure` or `reply` is set.
        details: Further finite numbers in the result of the reward function, beside "score".
        failure: "raised" (an exception, or a result of the wrong type or length), "timeout", "not_finite", or
            "died" (the worker process ended), or "memory" (no memory was left to the worker).
        message: For a failure: the exception, or the fault of the result.
        reply: Message of an environment to the policy. The policy responds again before there is a value.
        reward: Reward of the turn before a reply.
    """

    value: float | None
    details: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""
    reply: Message | None = None
    reward: float = 0.0


def failed(failure: Failure, message: str) -> Score:
    """Return the score of a failure, with the message cut at 500 characters."""
    return Score(value=None, failure=failure, message=message[:_MESSAGE_LIMIT])


def finite_score(value: float, details: Mapping[str, float]) -> Score:
    """Return the score of a conversation from the sum of its rewards. The sum of finite rewards may be infinite."""
    return Score(value, details) if math.isfinite(value) else failed("not_finite", f"the sum of the rewards is {value}")


def read_scores(outcome: object, name: str, batch: int | None) -> list[Score]:
    """Turn the outcome of one call into scores.

    Args:
        outcome: Result of the reward function, or the exception it raised. A result is a number (also a 0-d array or
            tensor), a mapping with "score" and further numbers, or a reply, which may have the "reward" of the turn. A
            batched call returns a list of results.
        name: Name of the reward, for messages.
        batch: Number of samples of a batched call. None for a call with one sample.
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
        of_turn = read_score({"score": result.get("reward", 0.0)}, f"{name}: reward")
        message = {key: value for key, value in result.items() if key != "reward"}
        return of_turn if of_turn.value is None else Score(None, reply=message, reward=of_turn.value)
    values: dict[Any, Any] = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in values:
        return failed("raised", f"{name}: the returned mapping has no 'score', only {list(map(str, values))}")
    numbers = {}
    for key, value in values.items():
        number = value.item() if getattr(value, "ndim", None) == 0 else value
        if not isinstance(number, int | float):
            return failed("raised", f"{name}: {str(key)!r} is {_type(number)}, not a number")
        if not abs(number) <= sys.float_info.max:
            shown = number if isinstance(number, float) else "too large for a float"
            return failed("not_finite", f"{name}: {str(key)!r} is {shown}")
        numbers[str(key)] = float(number)
    return Score(value=numbers.pop("score"), details=numbers)


def _type(value: object) -> str:
    return f"of type {type(value).__name__}"


def failure_counts(scores: Sequence[Score]) -> dict[str, int]:
    """Count the failures of each kind. Every kind is a key, so that all ranks log the same metrics."""
    counts = Counter(score.failure for score in scores)
    return {kind: counts[kind] for kind in get_args(Failure)}


def check_failure_rate(
    scores: Sequence[Score | None], max_failure_rate: float, num_requests: int | None = None
) -> None:
    """Raise an error if too many rewards failed.

    Args:
        scores: One entry per request. None for a request without a score yet, which counts as not failed.
        max_failure_rate: Largest allowed share of failed requests, 0 to 1.
        num_requests: Number of all requests, if `scores` has only a part of the entries.

    Raises:
        RewardError: More than `max_failure_rate` of the requests failed. The message has both numbers, and the most
            frequent failure with one example.
    """
    failures = [score for score in scores if score is not None and score.failure is not None]
    total = len(scores) if num_requests is None else num_requests
    if len(failures) <= max_failure_rate * total:
        return
    kind, count = Counter(score.failure for score in failures).most_common(1)[0]
    example = next(score.message for score in failures if score.failure == kind)
    raise RewardError(
        f"{len(failures)} of {total} rewards failed, more than max_failure_rate={max_failure_rate:g} "
        f"allows; most often: {kind} ({count} times), for example: {example}. Correct the reward, or raise "
        "max_failure_rate"
    )
