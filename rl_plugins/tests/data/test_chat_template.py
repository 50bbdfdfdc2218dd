"""Chat templates that raise any exception for messages (`rl_plugins.data.chat_template`)."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from rl_plugins.data.chat_template import TemplateRefusal, render, with_plain_template
from rl_plugins.data.following_messages import FollowingMessages, TurnTokenizer
from rl_plugins.data.parquet import load_rows
from rl_plugins.data.prompts import tokenize_rows
from rl_plugins.data.tokenization import encode_prompts
from rl_plugins.errors import ConfigError, RowError
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.pictures import row

SAID = [{"role": "user", "content": "hi"}]
FAILING = [
    ("{{ raise_exception('no users') }}", "no users"),
    ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ("{{ 1 // 0 }}", "by zero"),
    ("{{ messages[0].content.split(5) }}", "must be str or None"),
    ("{{ messages[7].content.role }}", "has no element 7"),
]


def test_render_begins_the_answer_unless_told_otherwise() -> None:
    tokenizer = build_tokenizer()
    whole = render(tokenizer, SAID, {})
    assert whole == render(tokenizer, SAID, {}, begins_answer=False) + "<|assistant|>"


@for_each(("template", "said"), FAILING)
def test_exception_of_a_template_is_a_refusal(template: str, said: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(TemplateRefusal, match=said):
        render(tokenizer, SAID, {})
    for prompt in (SAID, [{"role": "user", "content": tokenizer.eos_token}]):
        with pytest.raises(TemplateRefusal):
            encode_prompts([prompt], tokenizer, {})


def test_row_whose_text_the_template_refuses_is_named() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + (1 if m.content == 'b' else '') }}{% endfor %}"
    rows = load_rows([row(text) for text in "aaba"])
    with pytest.raises(RowError, match=r"row 2, column 'prompt': .* refuses messages of the roles user: can"):
        tokenize_rows(rows, tokenizer, {})


def test_following_messages_refuse_a_template_that_drops_the_turn_of_the_policy() -> None:
    tokenizer = build_tokenizer()
    # The template shows the first messages of a conversation only if the last one is short.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last or messages[-1].content | length < 20 %}"
        "{{ m.role }}: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    following = FollowingMessages(tokenizer, {})
    assert following.tokens((), [{"role": "user", "content": "short"}], 0)
    with pytest.raises(ConfigError, match="its text leaves the policy's turn out"):
        following.tokens((), [{"role": "user", "content": "long" * 9}], 0)


def test_turn_tokenizer_refuses_a_message_for_which_the_template_raises_any_exception() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ m.note + 1 if m.note }}{% endfor %}"
    turns = TurnTokenizer(tokenizer)
    with pytest.raises(ConfigError, match="refuses a message of the role 'user' after a response: can only"):
        turns.tokens([{"role": "user", "content": "4", "note": "text"}], 0, 9)


def test_plain_template_writes_the_texts_of_messages_alone() -> None:
    tokenizer = build_tokenizer()
    plain = with_plain_template(tokenizer)
    assert encode_prompts([[{"role": "user", "content": "2+3="}]], plain, {}) == [tokenizer("2+3=")["input_ids"]]
    assert render(tokenizer, SAID, {}) == "<|user|>hi<|assistant|>"


def test_plain_template_keeps_the_token_before_each_text() -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert render(with_plain_template(tokenizer), SAID, {}) == "hi"
    processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = processor
    plain = with_plain_template(tokenizer)
    assert encode_prompts([SAID], plain, {}) == [tokenizer("hi")["input_ids"]] == [[tokenizer.bos_token_id, 71, 72]]


def test_plain_template_needs_a_tokenizer_of_transformers() -> None:
    made: Any = build_tokenizer().backend_tokenizer
    with pytest.raises(ConfigError, match=r"the tokenizer is a Tokenizer, and no tokenizer of transformers: wrap"):
        with_plain_template(made)


def test_render_leaves_out_keys_without_a_value() -> None:
    """Parquet gives all messages the same keys, and the templates of Llama ask whether a message has `tool_calls`."""
    template = build_tokenizer()
    template.chat_template = (
        "{% for message in messages %}{% if 'tool_calls' in message %}{{ message.tool_calls | length }}{% endif %}"
        "{{ message.content }}{% endfor %}"
    )
    messages: list[Any] = [
        {"role": "user", "content": "?", "tool_calls": None},
        {"role": "x", "content": "!", "tool_calls": [{}]},
    ]
    assert render(template, messages, {}) == "?1!"
    assert messages[0]["tool_calls"] is None


PARTS_ALONE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""As LLaVA and Idefics write messages."""


def test_template_that_reads_parts_alone_gets_texts_as_parts() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = PARTS_ALONE
    end = tokenizer.eos_token
    assert render(tokenizer, SAID, {}) == f"user: hi{end}assistant: "
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert render(tokenizer, parts, {}) == f"user: hi{end}assistant: "
    (ids,) = encode_prompts([SAID], tokenizer, {})
    assert "hi" in tokenizer.decode(ids)
    following, _ = TurnTokenizer(tokenizer).tokens([{"role": "user", "content": "more"}], tokenizer.eos_token_id, 99)
    assert "user: more" in tokenizer.decode(following)
    assert len(set(map(tuple, tokenize_rows(load_rows([row("a"), row("b")]), tokenizer, {})[0]))) == 2


def test_role_developer_is_written_as_the_system_message_unless_the_template_has_the_role() -> None:
    tokenizer = build_tokenizer()
    roles = "('system', 'user')"
    tokenizer.chat_template = (
        f"{{% for m in messages if m.role in {roles} %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{{% endfor %}}"
    )
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "ask"},
        {"role": "developer", "content": "Be brief."},
    ]
    assert render(tokenizer, messages[1:], {}) == "<system>Be brief.<user>ask"
    assert render(tokenizer, messages, {}) == "<system>Be kind.\n\nBe brief.<user>ask"
    assert render(tokenizer, messages[:2], {}) == "<system>Be kind.<user>ask"
    answered = [*messages[:2], {"role": "assistant", "content": "yes"}, messages[2]]
    assert render(tokenizer, answered, {}) == "<system>Be kind.<user>ask<system>Be brief."
    tokenizer.chat_template = tokenizer.chat_template.replace("'system'", "'system', 'developer'")
    assert render(tokenizer, messages[1:], {}) == "<user>ask<developer>Be brief."
