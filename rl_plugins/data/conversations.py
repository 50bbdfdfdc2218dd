"""Rows with a whole conversation: messages and tools, checked and in one form.

Messages have the keys of chat templates. Reasoning has the key `reasoning_content`, arguments of calls are mappings,
and keys with null are left out: a parquet file has every key in every message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from rl_plugins.data.content_parts import IMAGES, has_values
from rl_plugins.data.dotted_keys import find
from rl_plugins.errors import RowError

MESSAGES, TOOLS = "messages", "tools"
"""Columns of a row in one form, beside `prompt`."""
ASSISTANT, TOOL = "assistant", "tool"
"""Role of the policy, and role of the result of a tool."""
REASONING, CALLS = "reasoning_content", "tool_calls"
REASONING_KEYS = (REASONING, "reasoning", "thinking")
"""Keys of the reasoning before the text of a message."""
_ROLES = ("system", "developer", "user", ASSISTANT, TOOL)
_KEYS = ("role", "content", "name", "tool_call_id", CALLS, *REASONING_KEYS)

Message = dict[str, Any]


def conversation_row(row: Mapping[str, Any], messages_key: str, tools_key: str, location: str) -> dict[str, Any]:
    """Return a row with the columns `prompt` (messages before the first reply), `messages`, and `tools` (or None).

    Args:
        row: the row of a data set.
        messages_key: dotted key of the messages: a list, or its JSON text.
        tools_key: dotted key of the JSON schemas of the tools: a list, or its JSON text. A row may lack the key.
        location: file and number of the row, for messages.

    Raises:
        RowError: the messages or the tools are malformed, no message or not the last is the policy's, or the row has
            images.
    """
    field = f"messages_key={messages_key!r}"
    for column in (IMAGES, "videos"):
        if isinstance(row, Mapping) and has_values(row, column):
            raise RowError(
                location,
                f"column {column!r}",
                f"a conversation of SFT has texts alone: remove the row or its {column}, or train on one response to a "
                "prompt with images (data.response_key)",
            )
    value = _list_of(find(row, messages_key, "messages_key", location), location, field, "messages {role, content}")
    messages = [_message(entry, f"message {number}", location, field) for number, entry in enumerate(value)]
    _check_order(messages, location, field)
    first = next(number for number, message in enumerate(messages) if message["role"] == ASSISTANT)
    prompt = [{"role": message["role"], "content": message["content"]} for message in messages[:first]]
    return {"prompt": prompt, MESSAGES: messages, TOOLS: _tools(row, tools_key, location)}


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message: reasoning, content, and calls in JSON."""
    yield message.get(REASONING, "")
    yield message["content"]
    yield from map(json.dumps, message.get(CALLS, ()))


def _list_of(value: object, location: str, field: str, entries: str) -> Sequence[Any]:
    """Return a list, also from its JSON text."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            found = None
    if isinstance(found, str) or not isinstance(found, Sequence) or not found:
        raise RowError(location, field, f"holds {_shown(value)}, not a list of {entries}: correct or remove the row")
    return found


def _message(entry: object, name: str, location: str, field: str) -> Message:
    """Return a checked message."""
    if not isinstance(entry, Mapping):
        raise RowError(location, field, f"{name} is {_shown(entry)}, not a mapping with role and content")
    given: Message = without_nulls(entry)
    role = given.get("role")
    if role not in _ROLES:
        raise RowError(location, field, f"{name} has the role {_shown(role)}: use one of {', '.join(_ROLES)}")
    for key in given:
        if key not in _KEYS:
            close = get_close_matches(str(key), _KEYS, n=1)
            raise RowError(
                location,
                field,
                f"{name} has the unknown key {key!r}: "
                + (f"rename it to {close[0]!r}, or remove it" if close else f"remove it (known: {', '.join(_KEYS)})"),
            )
    thoughts = [given.pop(key) for key in REASONING_KEYS if key in given]
    calls = given.pop(CALLS, None) or []
    if role != ASSISTANT and (any(thoughts) or calls):
        raise RowError(location, field, f"{name} of the role {role} has {CALLS} or reasoning: only the policy has them")
    message = {**given, "content": _text(given.get("content", ""), name, location, field)}
    if reasoning := next(filter(None, thoughts), None):
        message[REASONING] = _text(reasoning, name, location, field)
    if calls:
        place = f"{name}, {CALLS}"
        message[CALLS] = [_call(call, place, location, field) for call in _list_of(calls, location, field, "calls")]
    if role == ASSISTANT and not calls and not message["content"].strip():
        raise RowError(location, field, f"{name} of the policy is empty: remove the row, or give the message a text")
    return message


def _text(content: object, name: str, location: str, field: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, Sequence) else [content]:
        values = part if isinstance(part, Mapping) else {}
        if values.get("type") != "text" or not isinstance(values.get("text"), str):
            raise RowError(
                location,
                field,
                f"{name} has the content {_shown(part)}: a conversation of SFT has texts, or parts {{type: text, text: "
                "...}: remove the row",
            )
        texts.append(values["text"])
    return "".join(texts)


def _call(entry: object, place: str, location: str, field: str) -> Message:
    """Return a call in the form `{id, type, function: {name, arguments}}` with arguments as a mapping."""
    call = entry if isinstance(entry, Mapping) else {}
    function = call.get("function", call)
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(
            location,
            field,
            f"{place}: {_shown(entry)} is not {{function: {{name: ..., arguments: a mapping or its JSON text}}}}: "
            "correct or remove the row",
        )
    identity = {"id": call["id"]} if "id" in call else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _check_order(messages: Sequence[Message], location: str, field: str) -> None:
    """Check the roles of neighbouring messages."""
    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles:
        raise RowError(location, field, f"no message has the role {ASSISTANT!r}, so there is no reply: remove the row")
    if roles[0] == ASSISTANT:
        raise RowError(location, field, "message 0 is the policy's: begin with a message of the system or the user")
    if roles[-1] != ASSISTANT:
        raise RowError(
            location,
            field,
            f"the last message has the role {roles[-1]!r}: end the conversation with a reply of the role {ASSISTANT!r}",
        )
    for number, (before, role) in enumerate(pairwise(roles), 1):
        if role == TOOL and before not in (ASSISTANT, TOOL):
            raise RowError(
                location,
                field,
                f"message {number} has the role {TOOL!r} behind a message of the role {before!r}: a result of a tool "
                "follows the call of the policy, so correct or remove the row",
            )


def _tools(row: Mapping[str, Any], key: str, location: str) -> list[Any] | None:
    """Return the schemas of the tools of a row, each as `{type: function, function: {...}}`."""
    try:
        value = find(row, key, "tools_key", location)
    except RowError:
        return None
    if not value:
        return None
    tools, field = [], f"tools_key={key!r}"
    for number, entry in enumerate(_list_of(value, location, field, "JSON schemas of tools")):
        tool = without_nulls(_parsed(entry))
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(
                location, field, f"tool {number} is {_shown(entry)}, not {{type: function, function: {{name: ...}}}}"
            )
        tools.append({"type": "function", "function": dict(function)})
    return tools


def _parsed(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def without_nulls(value: Any) -> Any:
    """Return a value of JSON without the keys whose value is null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _shown(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
