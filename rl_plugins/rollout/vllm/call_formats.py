"""Forms of calls and answers, by the address of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_plugins.rollout.chat import ChatAnswer, ChatCall
from rl_plugins.rollout.vllm.chat_protocol import ChatEvents, completion, read_chat_call
from rl_plugins.rollout.vllm.responses_protocol import ResponseEvents, read_responses_call, response


class AnswerEvents(Protocol):
    """Server-sent events of an answer, which may begin while the policy samples.

    Attributes:
        sent: text of each choice in the events so far, by the number of the choice.
    """

    sent: dict[int, str]

    def more(self, texts: Sequence[str]) -> bytes:
        """Return events with the new text of each choice; empty without new text."""

    def rest(self, choices: Sequence[ChatAnswer]) -> bytes:
        """Return the events after the events so far."""

    def whole(self, choices: Sequence[ChatAnswer]) -> bytes:
        """Return all events, for a client that asks again."""


@dataclass(frozen=True)
class CallFormat:
    """Form of calls and answers.

    Attributes:
        read: function from the body of a call to the call.
        body: function from a call and its choices to the body of the answer.
        events: class of the events of a streamed answer.
    """

    read: Callable[[bytes], ChatCall]
    body: Callable[[ChatCall, Sequence[ChatAnswer]], bytes]
    events: Callable[[ChatCall], AnswerEvents]


FORMATS: Mapping[str, CallFormat] = {
    "/v1/chat/completions": CallFormat(read_chat_call, completion, ChatEvents),
    "/v1/responses": CallFormat(read_responses_call, response, ResponseEvents),
}
