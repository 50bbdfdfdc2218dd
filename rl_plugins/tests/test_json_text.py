"""JSON of others is read up to a bound of depth (`rl_plugins.json_text`)."""

from __future__ import annotations

import json

import pytest

from rl_plugins.json_text import MAX_DEPTH, read_foreign_json


def test_read_foreign_json_takes_values_up_to_the_bound_of_depth() -> None:
    for text in ("[" * MAX_DEPTH + "]" * MAX_DEPTH, '{"a": ' * MAX_DEPTH + "1" + "}" * MAX_DEPTH, b'{"a": [1, {}]}'):
        assert read_foreign_json(text) == json.loads(text)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10**5])
def test_read_foreign_json_refuses_deeper_values(depth: int) -> None:
    for text in ("[" * depth + "]" * depth, '{"a": ' * depth + "1" + "}" * depth):
        with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} lists and objects"):
            read_foreign_json(text)
