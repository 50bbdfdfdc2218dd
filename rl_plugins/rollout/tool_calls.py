"""Tool calls in responses of a policy, read by a parser of vLLM or by a function of the user."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rl_plugins.control_characters import whole_characters
from rl_plugins.data.reasoning import END_OF_THOUGHT, THINK
from rl_plugins.data.tokenization import ending_tokens
from rl_plugins.json_text import read_foreign_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ToolCall:
    """One call in a response.

    Attributes:
        name: name of the tool.
        arguments: arguments by name.
        fault: text for the policy if the call cannot be read; else empty.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True)
class ParsedResponse:
    """Response as a message of a chat.

    Attributes:
        content: text without the calls.
        calls: name and arguments of each call; the arguments are the text of a JSON object.
        is_malformed: True if the response has a call that cannot be read. `content` is then the whole text.
    """

    content: str
    calls: Sequence[tuple[str, str]] = ()
    is_malformed: bool = False


class ResponseParser(Protocol):
    """Finds the calls in the token ids of a response. The token ids before the response may open its reasoning."""

    def calls(self, response: Sequence[int], before: Sequence[int]) -> list[ToolCall]:
        """Return the calls of a response; an empty list for an answer without a call."""

    def parsed(self, response: Sequence[int], before: Sequence[int]) -> ParsedResponse:
        """Return text and calls of a response."""

    def text_before_calls(self, response: Sequence[int], before: Sequence[int]) -> str:
        """Return the text of an unfinished response as far as the text is certainly no part of a call."""


def read_call(name: object, arguments: object) -> ToolCall:
    """Return a call with checked types. The arguments are a mapping, or the text of a JSON object."""
    if not isinstance(name, str) or not name:
        return ToolCall("", fault="the call names no tool")
    try:
        # The way to the tool is JSON, so arguments must be JSON values.
        read = read_foreign_json(arguments if isinstance(arguments, str) else json.dumps(arguments))
    except (TypeError, ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        return ToolCall(name, fault=f"the arguments of {name} must be a JSON object")
    return ToolCall(name, read)


class FunctionParser:
    """Parser of the user, which reads reasoning, too.

    Args:
        function: function from the text of a response to a list of calls: mappings with `name` and `arguments`. The
            text has the special tokens, without the end of the response. A ValueError is a call that cannot be read.
        tokenizer: tokenizer of the policy.
    """

    def __init__(self, function: Callable[[str], Sequence[Mapping[str, Any]]], tokenizer: Any) -> None:
        self._function, self._tokenizer = function, tokenizer

    def calls(self, response: Sequence[int], before: Sequence[int]) -> list[ToolCall]:
        """Return the calls of a response."""
        text = decoded(self._tokenizer, response, skip_special_tokens=False)
        try:
            found = self._function(text)
            return [read_call(call.get("name"), call.get("arguments", {})) for call in found]
        # The parser may be a user's code, and a policy's text may make a parser fail in any way.
        except Exception as error:
            return [ToolCall("", fault=str(error) or type(error).__name__)]

    def parsed(self, response: Sequence[int], before: Sequence[int]) -> ParsedResponse:
        """Return the text of a response, or its calls without a text."""
        calls, text = self.calls(response, before), decoded(self._tokenizer, response, skip_special_tokens=True)
        if not calls or any(call.fault for call in calls):
            return ParsedResponse(text, is_malformed=bool(calls))
        texts = [json.dumps(dict(call.arguments), ensure_ascii=False) for call in calls]
        return ParsedResponse(
            "", [(whole_characters(call.name), text) for call, text in zip(calls, texts, strict=True)]
        )

    def text_before_calls(self, response: Sequence[int], before: Sequence[int]) -> str:
        """Return no text, because any text may become a call of the user's function."""
        return ""


def reasoning_of(text: str, mark: str, *, is_open: bool) -> str:
    """Return the reasoning at the beginning of a response, between `<think>` and `</think>`.

    Without an end, the whole text is reasoning if the text begins with `<think>`; a later `<think>` is a mention of the
    tag. Text between two parts of reasoning belongs to the reasoning. A `<think>` or `</think>` after the mark of a
    call is text of the call.

    Args:
        text: text of the response.
        mark: mark of calls; without a mark, the reasoning begins with the text.
        is_open: True if the text before the response has opened the reasoning.
    """
    rest = text
    while is_open or _has_reasoning(rest, mark):
        is_open, rest = False, rest.partition(END_OF_THOUGHT)[2].lstrip()
    return text[: len(text) - len(rest)]


def _has_reasoning(text: str, mark: str) -> bool:
    if text.lstrip().startswith(THINK):
        return True
    before = text.partition(mark)[0] if mark else ""
    return THINK in before and END_OF_THOUGHT in text.partition(THINK)[2]


def without_mark(text: str, mark: str) -> str:
    """Return the text before a mark, and before an end of the text that may become the mark."""
    if mark in text:
        return text[: text.index(mark)]
    begun = next((size for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), 0)
    return text[: len(text) - begun]


def decoded(tokenizer: PreTrainedTokenizerBase, response: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of a response without its end."""
    ids = list(response)
    if ids and ids[-1] in ending_tokens(tokenizer):
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))
