"""Tool parsers of vLLM by name, and a check that a parser reads the calls of a chat template."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rl_plugins.control_characters import whole_characters
from rl_plugins.data.chat_template import TemplateRefusal, render
from rl_plugins.data.reasoning import opens_reasoning
from rl_plugins.errors import ConfigError
from rl_plugins.rollout.tool_calls import (
    ParsedResponse,
    ToolCall,
    decoded,
    read_call,
    reasoning_of,
    without_mark,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNREADABLE = "the call cannot be read: check its format"
_TOOL = "get_weather"
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City."}},
            "required": ["city"],
        },
    },
}
_ARGUMENTS = {"city": "Paris"}
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)
_SHORTEST_MARK = 3


class VLLMToolParser:
    """Parser of vLLM. Calls in the reasoning of a response are no calls.

    Args:
        name: name of the parser, such as `hermes`, `llama3_json` or `qwen3_xml`.
        tokenizer: tokenizer of the policy.
        schemas: JSON schemas of the tools.
        template_options: further variables of the chat template.

    Raises:
        ConfigError: vLLM is not installed or has no such parser, or the parser does not fit the tokenizer or its chat
            template.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        schemas: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any],
    ) -> None:
        self._manager = check_name(name)
        # vLLM logs a traceback for each call that cannot be read.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        logging.getLogger("vllm.parser").setLevel(logging.CRITICAL)
        self._name, self._tokenizer = name, tokenizer
        try:
            self._parser, self._request = self._build(name, schemas)
        # Each parser has its own exception for a token that the tokenizer lacks.
        except Exception as error:
            raise ConfigError(
                f"parser={name} does not fit the tokenizer {tokenizer.name_or_path!r}: {' '.join(str(error).split())}"
            ) from None
        example = _rendered_call(tokenizer, template_options)
        if example is not None:
            self._check(example)
        self._mark = _mark(example) or getattr(self._parser, "tool_call_start_token", "")

    def calls(self, response: Sequence[int], before: Sequence[int]) -> list[ToolCall]:
        """Return the calls of a response."""
        _, text = self._read(response, before)
        found = _extracted(self._parser, self._request, text)
        if found is None or (not found and self._mark and self._mark in text):
            return [ToolCall("", fault=_UNREADABLE)]
        return found

    def parsed(self, response: Sequence[int], before: Sequence[int]) -> ParsedResponse:
        """Return text and calls of a response."""
        whole = decoded(self._tokenizer, response, skip_special_tokens=True)
        calls = self.calls(response, before)
        if not calls or any(call.fault for call in calls):
            return ParsedResponse(whole, is_malformed=bool(calls))
        reasoning, text = self._read(response, before)
        found = self._parser.extract_tool_calls(text, request=self._request)
        functions = [call.function for call in found.tool_calls]
        # An escape in the JSON of a call may be half a character.
        named = [(whole_characters(one.name), whole_characters(one.arguments)) for one in functions]
        return ParsedResponse(reasoning + (found.content or ""), named)

    def text_before_calls(self, response: Sequence[int], before: Sequence[int]) -> str:
        """Return the text before the mark of a call; no text for a parser without a mark."""
        if not self._mark:
            return ""
        reasoning, text = self._read(response, before)
        whole = decoded(self._tokenizer, response, skip_special_tokens=True)
        # The content of a message has no special tokens.
        pairs = zip(reasoning + without_mark(text, self._mark), whole, strict=False)
        return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _read(self, response: Sequence[int], before: Sequence[int]) -> tuple[str, str]:
        """Return the reasoning of a response, and the text after the reasoning."""
        text = decoded(self._tokenizer, response, skip_special_tokens=self._request.skip_special_tokens)
        reasoning = reasoning_of(text, self._mark, is_open=opens_reasoning(self._tokenizer, before))
        return reasoning, text[len(reasoning) :]

    def _build(self, name: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate(
            {"model": "", "messages": [{"role": "user", "content": ""}], "tools": list(schemas), "tool_choice": "auto"}
        )
        make_parser: Any = self._manager.get_tool_parser(name)
        parser = make_parser(self._tokenizer, request.tools)
        return parser, parser.adjust_request(request)

    def _check(self, example: str) -> None:
        """Compare the parser with the chat template.

        Raises:
            ConfigError: the parser does not read the template's own call.
        """
        if self._reads(self._name, example):
            return
        others = [name for name in self._manager.list_registered() if self._reads(name, example)]
        hint = f"use {' or '.join(others)}" if others else "name a function of yours"
        raise ConfigError(
            f"parser={self._name} does not read the calls of the chat template of "
            f"{self._tokenizer.name_or_path!r}, which look like {example!r}: {hint}"
        )

    def _reads(self, name: str, example: str) -> bool:
        try:
            parser, request = self._build(name, [_SCHEMA])
        # The code of vLLM's parsers raises exceptions of any class for a tokenizer of another family.
        except Exception:
            return False
        return _extracted(parser, request, example) == [ToolCall(_TOOL, _ARGUMENTS)]


def check_name(name: str) -> Any:
    """Return vLLM's manager of tool parsers.

    Raises:
        ConfigError: vLLM is not installed, or has no parser of this name.
    """
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        raise ConfigError(
            f"parser={name}: parsers by name come from vLLM, which is not installed: "
            "pip install 'rl-plugins[cpu]' or 'rl-plugins[gpu]', or name a function"
        ) from None
    known = ToolParserManager.list_registered()
    if name not in known:
        close = get_close_matches(name, known, n=3, cutoff=0.5)
        raise ConfigError(
            f"parser={name}: vLLM has no such tool parser: "
            + (f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(known)}")
        )
    return ToolParserManager


def _extracted(parser: Any, request: Any, text: str) -> list[ToolCall] | None:
    """Return the calls in a text; None if the parser raises an exception."""
    try:
        found = parser.extract_tool_calls(text, request=request).tool_calls
    # Parsers of vLLM expect the text of a trained model. A policy may write any text.
    except Exception:
        return None
    return [read_call(call.function.name, call.function.arguments) for call in found]


def _rendered_call(tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> str | None:
    """Return a call as the chat template writes it; None if the template refuses calls, or writes none."""
    options = {**template_options, "tools": [_SCHEMA]}
    call = {"type": "function", "id": "call00001", "function": {"name": _TOOL, "arguments": _ARGUMENTS}}
    question = {"role": "user", "content": "?"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before = render(tokenizer, [question], options)
        whole = render(tokenizer, [question, answer], options, begins_answer=False)
    except TemplateRefusal:
        return None
    if not whole.startswith(before) or _TOOL not in whole[len(before) :]:
        return None
    return whole[len(before) :].rstrip().removesuffix(str(tokenizer.eos_token))


def _mark(example: str | None) -> str:
    """Return the first word of a call, which shows that a response without a readable call was meant as a call."""
    before, _, _ = _THOUGHTS.sub("", example or "").partition(_TOOL)
    first = before.split()[0] if before.strip() else ""
    tag = first.partition("{")[0] or first
    return tag if len(tag) >= _SHORTEST_MARK else ""
