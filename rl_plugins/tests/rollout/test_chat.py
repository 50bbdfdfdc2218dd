"""Messages of the endpoint: comparison of the messages of two calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl_plugins.rollout.chat import NotContinued, canonical, continuation

QUESTION = {"role": "user", "content": "2 + 3"}
RESULT = {"role": "tool", "content": "5", "tool_call_id": "1"}


def answer(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return canonical({"role": "assistant", "content": None, "tool_calls": [call]})


def test_continuation_compares_arguments_of_calls_by_value() -> None:
    given = json.dumps({"a": 2, "b": "\u00e9"})
    before = [QUESTION, answer(given)]
    other_order = '{"b": "\u00e9", "a": 2}'
    for written in (json.dumps(json.loads(given), separators=(",", ":")), other_order, given):
        assert continuation(before, [QUESTION, answer(written), RESULT]) == [RESULT]
    for written in ('{"a": 3, "b": "\u00e9"}', '{"a": true, "b": "\u00e9"}', '{"a": 2}'):
        with pytest.raises(NotContinued, match="the answer that was given has another tool_calls"):
            continuation(before, [QUESTION, answer(written), RESULT])
    with pytest.raises(NotContinued):
        continuation([QUESTION, answer("{}")], [QUESTION, answer("oops"), RESULT])


def test_canonical_leaves_out_the_name_of_an_answer() -> None:
    assert canonical({"role": "assistant", "content": "5", "name": "solver"}) == {"role": "assistant", "content": "5"}
    assert canonical({"role": "user", "content": "?", "name": "ann"})["name"] == "ann"
