"""Returned values of a stateful environment: messages of `reset`, and messages, rewards or a score of `step`.

A value is read strictly, in the process of the object. A value of another type is a recorded failure, never a 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_plugins.rewards.records import Failure, Message, Score, both_kinds, failed, read_score


@dataclass(frozen=True)
class StepResult:
    """Result of a step with more than messages alone or a score alone.

    Attributes:
        messages: a text (a message of the user), a message with `role` and `content`, or a list of messages.
        reward: reward of this turn; None for a turn without a reward.
        score: final score; ends the conversation. None lets the conversation go on.
        details: further numbers beside the final score, by name.
        token_rewards: one reward for each token that the policy sampled in all turns, in place of rewards of turns;
            ends the conversation. Without `score`, their sum is the final score.
    """

    messages: str | Message | Sequence[Message] = ()
    reward: float | None = None
    score: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)
    token_rewards: Sequence[float] | None = None


@dataclass(frozen=True)
class Answer:
    """Answer of an object, in plain values.

    Attributes:
        messages: messages to the policy.
        reward: reward of the turn; None without a reward.
        score: final score; None without a score.
        details: further numbers beside the final score.
        token_rewards: rewards of tokens; None without such rewards.
        failure: kind of the failure; None for an answer without a failure.
        fault: description of the failure.
        seconds: time of the call, without pauses of its deadline.
        ended: time of the answer in seconds, on the clock of the machine; None before the answer is sent.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    score: float | None = None
    details: Mapping[str, float] = field(default_factory=dict)
    token_rewards: Sequence[float] | None = None
    failure: Failure | None = None
    fault: str = ""
    seconds: float = field(default=0.0, compare=False)
    ended: float | None = field(default=None, compare=False)

    def to_json(self) -> bytes:
        """Return the answer as JSON, with the time."""
        return json.dumps({**vars(self), "ended": time.monotonic()}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Answer:
        """Read an answer from JSON."""
        return cls(**json.loads(content))


def failure_of(failure: Failure, fault: str) -> Answer:
    """Return the answer of a failure, with the description cut at 500 characters."""
    return Answer(failure=failure, fault=failed(failure, fault).message)


def read_start(value: object, name: str) -> Answer:
    """Read the result of `reset`: at least one message."""
    messages = _messages(value)
    if isinstance(messages, str):
        return failure_of("raised", f"{name}: reset returned {messages}: return the first messages to the policy")
    if not messages:
        return failure_of("raised", f"{name}: reset returned no message: return the first messages to the policy")
    return Answer(messages)


def read_step(value: object, name: str) -> Answer:
    """Read the result of `step`: messages, a score, or a `StepResult`."""
    if isinstance(value, StepResult):
        return _read_result(value, name)
    if isinstance(value, str | list | tuple) or (isinstance(value, Mapping) and "role" in value):
        return _read_result(StepResult(value), name)
    return read_final(value, name)


def read_final(value: object, name: str) -> Answer:
    """Read a final score: a number, or a mapping with `score` or `token_rewards`, and further numbers."""
    score = read_score(value, name)
    if score.reply is not None:
        return failure_of("raised", f"{name}: a message is no score: return a number")
    return _with_score(Answer(), score)


def _read_result(result: StepResult, name: str) -> Answer:
    messages = _messages(result.messages)
    if isinstance(messages, str):
        return failure_of("raised", f"{name}: step returned {messages}: return messages, a score or a StepResult")
    is_final = result.score is not None or result.token_rewards is not None
    if not messages and not is_final:
        return failure_of("raised", f"{name}: step returned no message and no score: return a message or a score")
    answer = Answer(messages)
    if result.reward is not None:
        reward = read_score({"score": result.reward}, f"{name}: reward")
        if reward.failure is not None:
            return failure_of(reward.failure, reward.message)
        answer = Answer(messages, reward.value)
    if not is_final:
        return answer
    if result.token_rewards is not None and result.reward is not None:
        return _with_score(answer, both_kinds(Score(None), name))
    final = {**result.details, "score": result.score, "token_rewards": result.token_rewards}
    return _with_score(answer, read_score(final, name))


def _with_score(answer: Answer, score: Score) -> Answer:
    if score.failure is not None:
        return failure_of(score.failure, score.message)
    return Answer(answer.messages, answer.reward, score.value, score.details, score.token_rewards)


def _messages(value: object) -> list[Message] | str:
    """Return the messages, or a description of the fault."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    listed: Sequence[Any] = (
        [value] if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    )
    for message in listed:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            return f"{_shown(message)} in place of a message with 'role' and 'content'"
        if not isinstance(message["content"], str) or not isinstance(message["role"], str):
            return "a message whose role or content is not text"
    messages: list[Message] = [dict(message) for message in listed]
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        return f"a message that is not plain ({error})"
    return messages


def _shown(value: object) -> str:
    keys = f" with {', '.join(map(repr, value))}" if isinstance(value, Mapping) else ""
    return f"a value of type {type(value).__name__}{keys}"
