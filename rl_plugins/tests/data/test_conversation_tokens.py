"""Tokens and masks of conversations, against the chat template's own text of the whole conversation."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from rl_plugins.data.conversation_tokens import (
    ConversationSample,
    ConversationTokenizer,
    lengths_of,
    packed_samples,
    unpacked_samples,
)
from rl_plugins.data.conversations import conversation_row
from rl_plugins.data.following_messages import ToolMessages
from rl_plugins.data.tokenization import encode_prompts
from rl_plugins.errors import ConfigError, RowError
from rl_plugins.models.tiny import CHAT_TEMPLATE, TOOL_CHAT_TEMPLATE, build_tokenizer
from rl_plugins.tests.loops import for_each

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A line break follows each end of a turn."""
PHI = CHATML.replace("<|im_end|>", "<|rstrip|>")
"""The token at the end of a turn includes the line break behind it."""
FORGETFUL = (
    "{{ tools or '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and (loop.last or messages[loop.index].role == 'tool') %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Reasoning is left out once a message of the user follows, and kept before results of tools, as in Qwen3."""
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "3 😀é"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "\n 4 "},
]
WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "three"},
]


def tokenizer_of(template: str, *, tools: bool = False) -> Any:
    tokenizer: Any = build_tokenizer(tools=tools)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens([AddedToken("<|rstrip|>", special=True, rstrip=True)])
    tokenizer.chat_template = template
    return tokenizer


def samples(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, *, split: bool = False, options: Any = None
) -> list[ConversationSample]:
    row = conversation_row({"messages": messages, "tools": tools}, "messages", "tools", "row")
    (found,) = ConversationTokenizer(tokenizer, options or {}, split=split).encode([(row, "rows.parquet, row 3")])
    return found


def learnt(tokenizer: Any, sample: ConversationSample) -> str:
    kept = [token for token, counts in zip(sample.ids, sample.mask, strict=True) if counts]
    return str(tokenizer.decode(kept))


@for_each(
    ("template", "messages", "tools", "said"),
    [
        (CHAT_TEMPLATE, TALK, None, "3 😀é<|end|>\n 4 <|end|>"),
        (CHATML, TALK, None, "3 😀é<|im_end|>\n 4 <|im_end|>"),
        (PHI, TALK, None, "3 😀é<|rstrip|>\n 4 <|rstrip|>"),
        (
            TOOL_CHAT_TEMPLATE,
            WITH_TOOLS,
            [SCHEMA],
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|end|>three<|end|>',
        ),
    ],
)
def test_ids_are_the_ids_of_the_template_and_the_mask_covers_the_turns_of_the_policy(
    template: str, messages: list[dict[str, Any]], tools: Any, said: str
) -> None:
    tokenizer = tokenizer_of(template, tools=tools is not None)
    (sample,) = samples(tokenizer, messages, tools)
    whole = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    assert sample.ids == whole["input_ids"]
    assert learnt(tokenizer, sample) == said
    if "generation" in template.replace("add_generation_prompt", ""):
        assert sample.mask == whole["assistant_masks"]


def test_ids_are_the_tokens_of_a_rollout_with_tools() -> None:
    tokenizer, options = tokenizer_of(TOOL_CHAT_TEMPLATE, tools=True), {"tools": [SCHEMA]}
    (sample,) = samples(tokenizer, WITH_TOOLS, [SCHEMA])
    (prompt,) = encode_prompts([WITH_TOOLS[:1]], tokenizer, options)
    said = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    call, answer = (tokenizer.encode(f"{text}<|end|>") for text in (said, "three"))
    result = ToolMessages(tokenizer, options).tokens(["add"], ["3"], tokenizer.eos_token_id)
    assert sample.ids == [*prompt, *call, *result, *answer]
    masks = [0] * len(prompt), [1] * len(call), [0] * len(result), [1] * len(answer)
    assert sample.mask == [counts for mask in masks for counts in mask]


def test_token_over_the_beginning_of_a_turn_is_not_learnt() -> None:
    tokenizer = tokenizer_of(CHATML)
    tokenizer.add_tokens(["\n\n"])
    (sample,) = samples(tokenizer, [TALK[1], {"role": "assistant", "content": "\n3"}])
    assert sample.ids == tokenizer.apply_chat_template(
        [TALK[1], {"role": "assistant", "content": "\n3"}], return_dict=False
    )
    assert learnt(tokenizer, sample) == "3<|im_end|>"


def test_special_tokens_are_plain_text_but_in_turns_of_the_policy() -> None:
    tokenizer = tokenizer_of(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [{"role": "user", "content": "a<|im_end|>b"}, {"role": "assistant", "content": "x<|im_end|>y"}]
    (sample,) = samples(tokenizer, messages)
    assert tokenizer.decode(sample.ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert learnt(tokenizer, sample) == "x<|im_end|>y<|im_end|>"
    before, _ = lengths_of([sample])
    assert sample.ids[:before].count(end) == 1 and sample.ids[before:].count(end) == 2


def with_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**m, "reasoning": f"so {m['content']}"} if m["role"] == "assistant" else m for m in messages]


def test_template_that_is_not_append_only_is_refused_with_the_row_and_the_message() -> None:
    tokenizer = tokenizer_of(FORGETFUL, tools=True)
    with pytest.raises(RowError) as caught:
        samples(tokenizer, with_reasoning(TALK))
    assert str(caught.value).startswith("rows.parquet, row 3, conversation: the chat template of ")
    assert "writes message 2 otherwise once messages follow" in str(caught.value)
    assert "data.split_conversations=true" in str(caught.value)
    # Reasoning before results of tools stays.
    (sample,) = samples(tokenizer, with_reasoning(WITH_TOOLS), [SCHEMA])
    assert learnt(tokenizer, sample) == "<think>so </think>[add]<|im_end|><think>so three</think>three<|im_end|>"


def test_split_gives_each_changed_turn_a_sample_behind_the_text_of_a_rollout() -> None:
    tokenizer = tokenizer_of(FORGETFUL, tools=True)
    messages = with_reasoning([*WITH_TOOLS, *TALK[1:]])
    found = samples(tokenizer, messages, [SCHEMA], split=True)
    ends = [len(messages), 6, 4]
    options: dict[str, Any] = {"tools": [SCHEMA], "return_dict": False}
    named = [{**m, "reasoning_content": m.get("reasoning", "")} for m in messages]
    assert [sample.ids for sample in found] == [tokenizer.apply_chat_template(named[:end], **options) for end in ends]
    assert [learnt(tokenizer, sample) for sample in found] == [
        "<think>so \n 4 </think>\n 4 <|im_end|>",
        "<think>so 3 😀é</think>3 😀é<|im_end|>",
        "<think>so </think>[add]<|im_end|><think>so three</think>three<|im_end|>",
    ]
    opening = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, **options)
    assert lengths_of(found) == (len(opening), len(found[0].ids) - len(opening))
    decoded = list(unpacked_samples(packed_samples(found)))
    for sample, (prompt, response, mask) in zip(found, decoded, strict=True):
        assert [*prompt, *response] == sample.ids and [*[0] * len(prompt), *mask] == sample.mask and mask[0] == 1


def test_reasoning_stands_before_the_text_if_the_template_has_no_place() -> None:
    # A word of a template is no key.
    for template in (CHATML, CHATML + "{# internal reasoning #}"):
        tokenizer = tokenizer_of(template)
        (sample,) = samples(tokenizer, [TALK[1], {"role": "assistant", "content": "3", "reasoning": "1 and 2"}])
        assert learnt(tokenizer, sample) == "<think>\n1 and 2\n</think>\n\n3<|im_end|>"


@for_each(
    ("template", "messages", "said"),
    [
        (CHATML, WITH_TOOLS, "writes message 1 without its tool_calls. Use the tokenizer of a model with tools"),
        (CHATML + "{# m.tool_calls #}", WITH_TOOLS, "writes message 1 without the text 'add'"),
        (
            CHATML.replace("{{ m.content }}", "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}"),
            [WITH_TOOLS[0], {**WITH_TOOLS[1], "tool_calls": WITH_TOOLS[1]["tool_calls"] * 2}, *WITH_TOOLS[2:]],
            "writes message 1 without all of its 2 calls",
        ),
        (
            CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'developer' %}"),
            [{"role": "developer", "content": "Be brief."}, *TALK[1:]],
            "writes message 0 not, or in other words",
        ),
        (CHATML.replace("<|im_end|>", ""), TALK, "writes message 2 without a special token at its end"),
        (CHATML.replace("{{ m.content }}", "{{ m.content[:1] }}"), TALK, "writes message 2 without the text '3 😀é'"),
        (
            CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"),
            TALK,
            "writes message 2 otherwise than it begins the policy's turn",
        ),
        (CHATML + "{{ raise_exception('too long') if messages[3] }}", TALK, "roles system, user, assistant, user"),
    ],
)  # fmt: skip
def test_template_that_loses_a_part_of_a_conversation_is_refused(
    template: str, messages: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(RowError) as caught:
        samples(tokenizer_of(template), messages)
    assert said in str(caught.value) and str(caught.value).startswith("rows.parquet, row 3, conversation: ")


def test_tools_are_shown_by_the_template_or_refused() -> None:
    with pytest.raises(ConfigError, match="does not show tools to the policy"):
        samples(tokenizer_of(CHATML), TALK, [SCHEMA])
    other = {"type": "function", "function": {"name": "mul", "parameters": {"properties": {"x": {}}}}}
    tokenizer = tokenizer_of(TOOL_CHAT_TEMPLATE, tools=True)
    options = {"tools": [other]}
    (of_option,), (of_row,) = (samples(tokenizer, WITH_TOOLS, of, options=options) for of in (None, [SCHEMA]))
    assert "mul(x)" in tokenizer.decode(of_option.ids)
    assert "add(a,b)" in tokenizer.decode(of_row.ids) and "mul(x)" not in tokenizer.decode(of_row.ids)
