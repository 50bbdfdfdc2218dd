"""What crosses the process border between a stage and its reward workers: two frozen records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, Any]
Failure = Literal["raised", "timeout", "not_finite", "died"]


@dataclass(frozen=True)
class ScoringRequest:
    """One response to be scored; the names are those by which a reward function asks for its arguments.

    Attributes:
        data_source: Name of the data set the prompt came from; chooses the scorer.
        solution_str: The response as text, without the prompt.
        ground_truth: `reward_model["ground_truth"]` of the row, as stored.
        extra_info: The row's `extra_info`.
        prompt: The prompt's messages (list of {role, content}), or None.
        turns: What was said in between, if the response is not the first.
        turns_left: How often the policy may speak after this response; 0 asks for the score.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    prompt: Any = None
    turns: Sequence[Message] = ()
    turns_left: int = 0

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, the response last."""
        return [*(self.prompt or ()), *self.turns, {"role": "assistant", "content": self.solution_str}]


@dataclass(frozen=True)
class Score:
    """What became of one request: a finite value, or None and the reason; a failure is never a value of 0.

    Attributes:
        value: The reward; None exactly if `failure` or `reply` is set.
        details: Further finite numbers the reward function returned beside "score".
        failure: "raised" (an exception, or a result of the wrong type or length), "timeout", "not_finite", or
            "died" (the worker process ended).
        message: For a failure: the exception or what was wrong.
        reply: What an environment says to the policy, which is to speak again before there is a value.
    """

    value: float | None
    details: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    message: str = ""
    reply: Message | None = None
