"""Checks of the arguments of calls against schemas of functions and of servers."""

from __future__ import annotations

from typing import Any, Literal

from rl_plugins.environments.tool_functions import Threads, ToolSchema, shortened, tool_of
from rl_plugins.tests.loops import for_each

PATH = {"path": {"type": "string"}}


def of_server(**parameters: Any) -> ToolSchema:
    return ToolSchema({"type": "function", "function": {"name": "t", "parameters": parameters}}, None, is_closed=False)


@for_each(
    ("parameters", "arguments"),
    [
        ({}, {"a": 1}),
        ({"type": "object"}, {"a": 1}),
        ({"type": "object", "properties": PATH}, {"path": "a", "b": 1}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}),
        (
            {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
            {"x-a": 1},
        ),
        (
            {"type": "object", "anyOf": [{"properties": PATH, "required": ["path"]}, {"required": ["id"]}]},
            {"path": "a"},
        ),
        ({"oneOf": [{"required": ["path"]}, {"required": ["id"]}]}, {"id": 1}),
        ({"allOf": [{"properties": PATH}, {"required": ["id"]}]}, {"path": "a", "id": 1}),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "object", "properties": PATH}}}, {"path": "a"}),
        ({"properties": {"a": {"$ref": "#/definitions/p"}}, "definitions": {"p": {"type": "integer"}}}, {"a": 1}),
        ({"properties": {"a": {"type": ["integer", "null"]}}}, {"a": None}),
        ({"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}, {"a": None}),
        ({"properties": {"a": {"type": "string", "enum": ["x"], "nullable": True}}}, {"a": None}),
        # In draft 7, a list of items describes the first items.
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "properties": {"a": {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}},
            },
            {"a": [1, "x"]},
        ),
        # The server checks its arguments by a schema that cannot be read here.
        ({"properties": {"a": {"type": "string", "pattern": r"^\p{L}+$"}}}, {"a": "x"}),
        ({"properties": {"a": {"$ref": "https://example.invalid/schema.json"}}}, {"a": 1}),
        ({"properties": {"a": {"type": "object", "required": True}}}, {"a": {}}),
    ],
)
def test_schema_of_a_server_accepts_each_good_call(parameters: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert of_server(**parameters).fault(arguments) == ""


@for_each(
    ("parameters", "arguments", "fault"),
    [
        ({"properties": PATH, "required": ["path"]}, {}, "'path' is a required property"),
        ({"properties": PATH}, {"path": None}, "path: None is not of type 'string'"),
        (
            {"properties": PATH, "additionalProperties": False},
            {"b": 1},
            "Additional properties are not allowed ('b' was unexpected)",
        ),
        ({"$ref": "#/$defs/p", "$defs": {"p": {"properties": PATH}}}, {"path": 1}, "path: 1 is not of type 'string'"),
    ],
)
def test_schema_of_a_server_refuses_bad_calls(
    parameters: dict[str, Any], arguments: dict[str, Any], fault: str
) -> None:
    assert of_server(**parameters).fault(arguments) == fault


def test_function_takes_null_for_optional_arguments_and_no_further_arguments() -> None:
    def find(word: str, kind: Literal["noun", "verb"] | None = None, most: int | None = None) -> str:
        """Find a word.

        Args:
            word: the word.
            kind: kind of the word.
            most: largest number of results.
        """
        return word

    tool = tool_of("find", find, {}, Threads())
    assert tool.fault({"word": "a", "kind": None, "most": None}) == tool.fault({"word": "a", "kind": "noun"}) == ""
    assert "'x' is not" in tool.fault({"word": "a", "most": "x"}) and "'x' is not" in tool.fault(
        {"word": "a", "kind": "x"}
    )
    assert "('more' was unexpected)" in tool.fault({"word": "a", "more": 1})
    assert "None is not of type" in tool.fault({"word": None})


def test_function_without_arguments_takes_none() -> None:
    def wait() -> None:
        """Wait."""

    assert "('a' was unexpected)" in tool_of("wait", wait, {}, Threads()).fault({"a": 1})


@for_each(
    ("left_out", "text"),
    [
        ("beginning", "[7 characters left out] 789"),
        ("middle", "01 [7 characters left out] 9"),
        ("end", "012 [7 characters left out]"),
    ],
)
def test_shortened_puts_a_mark_in_place_of_the_left_out_part(left_out: str, text: str) -> None:
    assert shortened("0123456789", 3, left_out) == text
    assert shortened("012", 3, left_out) == "012"
    assert shortened("0123", 1, "middle") == "0 [3 characters left out]"
