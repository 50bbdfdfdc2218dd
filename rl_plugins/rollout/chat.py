"""Calls of a chat, and the rule by which a call continues an earlier call.

Messages are compared in one form (`canonical`). The token ids of a continued conversation are never made from text
again: only the messages after the last answer become tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl_plugins.json_text import read_foreign_json

Message = Mapping[str, Any]


class Refused(Exception):
    """Call that is refused with a reason for the client.

    Attributes:
        kind: type of the error in OpenAI's protocol.
    """

    kind: ClassVar[str] = "invalid_request_error"


class NoRoom(Refused):
    """Call for which the limits of a trajectory leave no room. A client may take the trajectory as cut."""

    kind: ClassVar[str] = "context_length_exceeded"


class NotContinued(Refused):
    """Call that does not continue an earlier call."""


@dataclass(frozen=True)
class ChatCall:
    """One call of the policy.

    Attributes:
        messages: messages in the form of `canonical`.
        tools: JSON schemas of the tools.
        may_call: True if calls of tools are read in the answer.
        one_call: True if the answer has at most one call of a tool.
        max_tokens: longest answer in tokens; None without a limit of the call.
        logprobs: True if the answer has log-probs.
        stream: True if the answer is a stream of events.
        stream_usage: True if the stream has the numbers of tokens.
        model: name of the model in the call.
        num_choices: number of answers to the call.
        token_ids: True if the answer has token ids.
        answer_id: id of the answer for `previous_id` of a later call; empty without an id.
        previous_id: id of the answer that the call continues; None for a call with all messages.
        has_instructions: True if the first message is for this call alone, and not for a call with `previous_id`.
        created: time of the call, in seconds since 1970.
    """

    messages: Sequence[Message]
    tools: Sequence[Message]
    may_call: bool
    one_call: bool
    max_tokens: int | None
    logprobs: bool
    stream: bool
    stream_usage: bool
    model: str
    num_choices: int = 1
    token_ids: bool = False
    answer_id: str = ""
    previous_id: str | None = None
    has_instructions: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class ChatAnswer:
    """Answer to a call: one of its choices.

    Attributes:
        content: text without calls of tools.
        calls: calls of tools, in the form of messages.
        finish_reason: `stop`, `length` or `tool_calls`.
        prompt_ids: token ids before the answer.
        tokens: token ids of the answer.
        token_texts: text of each token, for log-probs.
        log_probs: log-prob of each token.
    """

    content: str
    calls: Sequence[Message]
    finish_reason: str
    prompt_ids: Sequence[int]
    tokens: Sequence[int]
    token_texts: Sequence[str]
    log_probs: Sequence[float]

    @property
    def message(self) -> Message:
        """The answer as a message of the next call."""
        return canonical({"role": "assistant", "content": self.content, "tool_calls": list(self.calls)})


def canonical(message: Message) -> dict[str, Any]:
    """Return a message in the form for comparison and for chat templates: text, and calls of tools.

    Raises:
        Refused: the message has other content than text, or is no message.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused("messages: each message is an object with a role")
    found: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"))}
    # An agent may name an answer of the policy, after itself.
    names = ("tool_call_id",) if message["role"] == "assistant" else ("name", "tool_call_id")
    found |= {name: str(message[name]) for name in names if message.get(name) is not None}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: the arguments of calls are mappings."""
    return [
        {**message, "tool_calls": [_with_mapping(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def continuation(before: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """Return the new messages of a call.

    Arguments of calls are compared by value, because a client may write them again in other characters.

    Args:
        before: messages of the earlier call, and the answer to the call.
        messages: messages of the new call.

    Raises:
        NotContinued: the new call does not begin with `before`, or has no new message.
    """
    for place, (earlier, message) in enumerate(zip(before, messages, strict=False)):
        if earlier != message and _for_comparison(earlier) != _for_comparison(message):
            changed = [name for name in {**earlier, **message} if earlier.get(name) != message.get(name)]
            what = "the answer that was given" if place == len(before) - 1 else f"message {place} of the earlier call"
            raise NotContinued(f"{what} has another {' and '.join(changed)}")
    if len(messages) < len(before):
        raise NotContinued(f"the call has {len(messages)} messages, and the conversation has {len(before)}")
    if len(messages) == len(before):
        raise NotContinued("the call has no message after the answer that was given")
    return list(messages[len(before) :])


def _for_comparison(message: Message) -> str:
    calls = message.get("tool_calls", ())
    return json.dumps([for_template([message]), [_has_arguments(call) for call in calls]], sort_keys=True)


def _has_arguments(call: Message) -> bool:
    try:
        read_foreign_json(call["function"]["arguments"])
    except ValueError:
        return False
    return True


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [content]
    if any(not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in parts):
        raise Refused("messages: the policy reads text alone: send the content as text")
    # As vLLM's own server joins the parts.
    return "\n".join(part["text"] for part in parts)


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused("messages: a call of a tool has a function with a name")
    arguments = function.get("arguments") or "{}"
    return {
        "id": str(call.get("id")),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        },
    }


def _with_mapping(call: Message) -> dict[str, Any]:
    try:
        arguments = read_foreign_json(call["function"]["arguments"])
    except ValueError:
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}
