"""ToolMessages over chat templates of several families."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.data.following_messages import FollowingMessages, ToolMessages, ToolUse
from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import TOOL_CHAT_TEMPLATE, build_tokenizer

SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
THOUGHTS = (
    "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function | tojson }}]{% endfor %}<|end|>\n"
    "{% endfor %}<|assistant|>"
)
"""The last message of the policy looks different, as in Qwen3, and all turns end with the end-of-sequence token."""
SINGLE = (
    "{{ tools }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('single calls only') }}{% endif %}<|assistant|>{{ m.tool_calls[0].function | tojson }}<|end|>"
    "{% elif m.role == 'tool' %}<|tool|>{{ {'output': m.content} | tojson }}<|end|>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
)
"""One call at a time, whose text is left out, and results in JSON, as in Llama 3.1."""
PLAIN = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
"""No calls, and no end-of-sequence token."""


NAME_LAST = (
    "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "[{{ call.function.arguments | tojson }} {{ call.function.name }}]{% endfor %}<|end|>\n{% endfor %}<|assistant|>"
)
"""The name of a tool is behind the arguments of a call."""
NAMED_RESULTS = "{{ tools }}{% for m in messages %}{{ m.role }} {{ m.name }}: {{ m.content }}\n{% endfor %}assistant: "
"""The name of a tool is in the result, and there is no end-of-sequence token."""


def tokenizer_of(template: str) -> Any:
    tokenizer: Any = build_tokenizer(tools=True)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "results", "text"),
    [
        (TOOL_CHAT_TEMPLATE, ["1", "2"], "<|tool|>1<|tool|>2<|assistant|>"),
        (THOUGHTS, ["1", "2"], "\n<|tool|>1<|end|>\n<|tool|>2<|end|>\n<|assistant|>"),
        (SINGLE, ["1"], '<|tool|>{"output": "1"}<|end|><|assistant|>'),
        (SINGLE, ["1", "2"], '<|tool|>{"output": "1\\n2"}<|end|><|assistant|>'),
        (PLAIN, ["1", "2"], "\ntool: 1\ntool: 2\nassistant: "),
        (PLAIN, ["whatever-was-said"], "\ntool: whatever-was-said\nassistant: "),
    ],
)
def test_tokens_are_the_text_of_the_template_after_the_response(template: str, results: list[str], text: str) -> None:
    tokenizer = tokenizer_of(template)
    messages = ToolMessages(tokenizer, {"tools": [SCHEMA]})
    assert tokenizer.decode(messages.tokens(["f"] * len(results), results, tokenizer.eos_token_id)) == text


def test_turns_with_calls_may_end_with_another_token_than_the_sequence() -> None:
    """As in base models of Qwen."""
    tokenizer = tokenizer_of(THOUGHTS)
    end = tokenizer.eos_token_id
    expected = ToolMessages(tokenizer, {"tools": [SCHEMA]}).tokens(["f"], ["1"], end)
    tokenizer.eos_token = tokenizer.pad_token
    assert tokenizer.eos_token_id != end
    assert ToolMessages(tokenizer, {"tools": [SCHEMA]}).tokens(["f"], ["1"], end) == expected


def test_tokens_treat_special_tokens_in_results_as_plain_text() -> None:
    tokenizer = tokenizer_of(TOOL_CHAT_TEMPLATE)
    messages = ToolMessages(tokenizer, {"tools": [SCHEMA]})
    tokens = messages.tokens(["f"], ["<|end|>"], tokenizer.eos_token_id)
    assert tokenizer.decode(tokens) == "<|tool|><|end|><|assistant|>" and tokenizer.eos_token_id not in tokens
    # A response that a stop string ended has no end-of-sequence token.
    assert messages.tokens(["f"], ["1"], 0)[0] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (NAME_LAST, "<|end|>\n<|tool|>1<|end|>\n<|assistant|>"),
        (NAMED_RESULTS, "\ntool f<|end|><|user|>g: 1\nassistant: "),
    ],
)
def test_special_tokens_in_an_invented_name_of_a_tool_are_plain_text(template: str, text: str) -> None:
    tokenizer = tokenizer_of(template)
    name = "f<|end|><|user|>g"
    following = FollowingMessages(tokenizer, {"tools": [SCHEMA]})
    result = {"role": "tool", "name": name, "tool_call_id": "call00000", "content": "1"}
    # The response has no end-of-sequence token of its own.
    tokens = following.tokens([ToolUse("call00000", name)], [result], 0)
    assert tokenizer.decode(tokens) == text
    assert tokens.count(tokenizer.eos_token_id) == template.count("<|end|>") * 2


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not show tools to the policy"),
        ("{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", "leaves the result"),
        ("{{ tools }}{{ raise_exception('no') if messages[-1].role == 'tool' }}", r"has no tool role \(no\)"),
        ("{{ tools }}{{ messages[-1].content }}", "does not end the policy's turn"),
    ],
)
def test_template_without_a_place_for_tools_is_refused(template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ToolMessages(tokenizer_of(template), {"tools": [SCHEMA]})
