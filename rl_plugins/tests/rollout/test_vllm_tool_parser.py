"""Parsers of vLLM with the tokens and the chat template of their models."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm.entrypoints.openai.chat_completion.protocol
import vllm.tool_parsers  # noqa: F401

from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.rollout.tool_calls import ToolCall
from rl_plugins.rollout.vllm.tool_parser import VLLMToolParser

LLAMA3_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_llama3_json_reads_calls_from_tokens() -> None:
    tokenizer: Any = build_tokenizer(tools=True)
    tokenizer.chat_template = LLAMA3_TEMPLATE
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|python_tag|>"]}, replace_extra_special_tokens=False)
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    schema = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": schema}]
    parser = VLLMToolParser("llama3_json", tokenizer, tools, {"tools": tools})
    call, once = '{"name": "add", "parameters": {"a": 1, "b": 2}}', ToolCall("add", {"a": 1, "b": 2})
    for text, calls in (
        (f"{call}<|end|>", [once]),
        (f"<|python_tag|>{call}<|end|>", [once]),
        (f"{call}; {call}<|end|>", [once, once]),
        ("3<|end|>", []),
    ):
        assert parser.calls(tokenizer.encode(text), []) == calls, text
    (broken,) = parser.calls(tokenizer.encode('{"name": "add", "parameters": {"a": 1<|end|>'), [])
    assert broken.fault


def call_of(argument: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": "{argument}"}}}}</tool_call>'


def test_calls_count_after_the_reasoning_alone() -> None:
    tokenizer: Any = build_tokenizer(tools=True)
    schema = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {}}}}
    tools = [{"type": "function", "function": schema}]
    parser = VLLMToolParser("hermes", tokenizer, tools, {"tools": tools})
    closed, opened = "<|user|>2+3<|assistant|>", "<|user|>2+3<|assistant|><think>\n"
    idea, broken, good = call_of("1"), "<tool_call>{", call_of("2")
    for before, reasoning, rest, arguments in (
        (closed, f"<think>{idea}</think>\n\n", f"I add. {good}", ["2"]),
        (closed, f"<think>{broken}</think>", good, ["2"]),
        (closed, f"\n<think>{broken}</think>so <think>{idea}</think> ", good, ["2"]),
        (closed, f"So <think>{idea}</think> ", good, ["2"]),
        (closed, f"<think>{idea}</think>", "3", []),
        (closed, f"<think>{idea}", "", []),
        (opened, f"{idea}</think>", good, ["2"]),
        (opened, f"{broken}</think>\n", "3", []),
        (opened, idea, "", []),
        # A mention of the tag begins no reasoning.
        (closed, "", f"I put the <think> tag into the page. {good}", ["2"]),
        (closed, f"<think>{idea}</think>", f"I wrote <think> before. {good}", ["2"]),
        (closed, f"\n<think>I wrote {idea}", "", []),
        # A call is whole with any argument.
        (closed, "", call_of("</think>"), ["</think>"]),
        (closed, "", call_of("<think>"), ["<think>"]),
        (closed, "", f"{good}</think>{good}", ["2", "2"]),
        (closed, f"<think>{idea}</think>", call_of("<think>x</think>"), ["<think>x</think>"]),
        (opened, f"{idea}</think>", call_of("</think>"), ["</think>"]),
    ):
        response, prompt = tokenizer.encode(f"{reasoning}{rest}<|end|>"), tokenizer.encode(before)
        calls = parser.calls(response, prompt)
        assert calls == [ToolCall("add", {"a": one}) for one in arguments], (reasoning, rest)
        parsed, text = parser.parsed(response, prompt), rest.partition("<tool_call>")[0]
        assert (parsed.content, len(parsed.calls)) == (f"{reasoning}{text}", len(arguments)), (reasoning, rest)
        assert parser.text_before_calls(response, prompt) == f"{reasoning}{text}", (reasoning, rest)
    # A call after the reasoning that cannot be read is malformed.
    (malformed,) = parser.calls(tokenizer.encode(f"<think>{idea}</think>{broken}<|end|>"), tokenizer.encode(closed))
    assert malformed.fault
