"""Rows with whole conversations: one form of messages and tools, and a reason for each malformed row."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from rl_plugins.data.conversations import conversation_row, texts_of
from rl_plugins.errors import RowError
from rl_plugins.tests.loops import for_each

ASKED = {"role": "user", "content": "17+25"}
REPLY = {"role": "assistant", "content": "42"}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}


def read(messages: object, **columns: Any) -> dict[str, Any]:
    return conversation_row({"messages": messages, **columns}, "messages", "tools", "rows.parquet, row 3")


def test_conversation_row_has_the_messages_before_the_first_reply_as_prompt() -> None:
    messages = [{"role": "system", "content": "Add."}, ASKED, REPLY, ASKED, REPLY]
    assert read(messages) == {"prompt": messages[:2], "messages": messages, "tools": None}
    row = {"extra": {"talk": messages}, "schemas": [SCHEMA], "images": []}
    found = conversation_row(row, "extra.talk", "schemas", "row")
    assert found["messages"] == messages and found["tools"] == [SCHEMA]


def test_conversation_row_reads_calls_in_every_form_alike() -> None:
    function = CALL["function"]
    as_text = {**CALL, "function": {**function, "arguments": json.dumps(function["arguments"])}}
    result = {"role": "tool", "content": "42", "tool_call_id": "c"}
    for calls in ([CALL], [as_text], json.dumps([CALL]), [{"id": "c", **function}]):
        found = read([ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, result, REPLY])
        assert found["messages"] == [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, result, REPLY]
    assert list(texts_of(found["messages"][1])) == ["", "", json.dumps(CALL)]


def test_conversation_row_reads_reasoning_and_tools_in_every_form_alike() -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        assert read([ASKED, {**REPLY, key: "add"}])["messages"][1] == {**REPLY, "reasoning_content": "add"}
    for tools in ([SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)], [SCHEMA["function"]]):
        assert read([ASKED, REPLY], tools=tools)["tools"] == [SCHEMA]
    assert read([ASKED, REPLY], tools=[])["tools"] is None
    assert read(json.dumps([ASKED, REPLY]))["messages"] == [ASKED, REPLY]
    parts = [{"type": "text", "text": "17"}, {"type": "text", "text": "+25"}]
    assert read([{**ASKED, "content": parts}, REPLY])["messages"] == [ASKED, REPLY]


def test_conversation_row_leaves_nulls_of_parquet_out() -> None:
    messages = [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "42"},
        REPLY,
    ]
    (stored,) = pa.Table.from_pylist([{"messages": messages}]).to_pylist()
    assert stored["messages"][0].keys() > ASKED.keys()
    assert conversation_row(stored, "messages", "tools", "row")["messages"] == messages


@for_each(
    ("messages", "said"),
    [
        (None, "holds nothing, not a list of messages"),
        ([], "not a list of messages {role, content}: correct or remove the row"),
        ("17+25", "holds str '17+25', not a list of messages"),
        ([7, REPLY], "message 0 is int '7', not a mapping with role and content"),
        ([ASKED], "no message has the role 'assistant', so there is no reply: remove the row"),
        ([REPLY], "message 0 is the policy's: begin with a message of the system or the user"),
        ([ASKED, REPLY, ASKED], "the last message has the role 'user': end the conversation with a reply"),
        ([{**ASKED, "role": "human"}, REPLY], "message 0 has the role str 'human': use one of system, developer, user"),
        ([{"content": "17"}, REPLY], "message 0 has the role nothing"),
        ([ASKED, {**REPLY, "tool_call": []}], "unknown key 'tool_call': rename it to 'tool_calls', or remove it"),
        ([ASKED, {**REPLY, "weight": 0}], "unknown key 'weight': remove it (known: role, content"),
        ([ASKED, {**REPLY, "content": " "}], "message 1 of the policy is empty: remove the row"),
        ([{**ASKED, "reasoning": "add"}, REPLY], "message 0 of the role user has tool_calls or reasoning"),
        ([ASKED, {"role": "tool", "content": "1"}, REPLY], "role 'tool' behind a message of the role 'user'"),
        ([{**ASKED, "content": [{"type": "image"}]}, REPLY], "a conversation of SFT has texts"),
        ([{**ASKED, "content": 7}, REPLY], "message 0 has the content int '7'"),
        ([ASKED, {**REPLY, "tool_calls": [{"name": "f", "arguments": "x"}]}], "arguments: a mapping or its JSON text"),
        ([ASKED, {**REPLY, "tool_calls": [7]}], "message 1, tool_calls: int '7' is not"),
    ],
)  # fmt: skip
def test_conversation_row_names_the_fault_and_the_way_out(messages: object, said: str) -> None:
    with pytest.raises(RowError) as caught:
        read(messages)
    assert str(caught.value).startswith("rows.parquet, row 3, messages_key='messages': ") and said in str(caught.value)


def test_conversation_row_refuses_images_and_malformed_tools() -> None:
    for columns, said in (
        ({"images": ["a.png"]}, "column 'images': a conversation of SFT has texts alone: remove the row or its images"),
        ({"videos": ["a.mp4"]}, "column 'videos': a conversation of SFT has texts alone"),
        ({"tools": [{"name": 7}]}, "tools_key='tools': tool 0 is dict"),
        ({"tools": "add"}, "tools_key='tools': holds str 'add', not a list of JSON schemas of tools"),
    ):
        with pytest.raises(RowError) as caught:
            read([ASKED, REPLY], **columns)
        assert said in str(caught.value)
    with pytest.raises(RowError, match="messages_key='messages': leads nowhere at 'messages'; there is prompt"):
        conversation_row({"prompt": 1}, "messages", "tools", "row")
