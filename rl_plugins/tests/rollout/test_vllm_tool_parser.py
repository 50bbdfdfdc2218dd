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
        assert parser.calls(tokenizer.encode(text)) == calls, text
    (broken,) = parser.calls(tokenizer.encode('{"name": "add", "parameters": {"a": 1<|end|>'))
    assert broken.fault
