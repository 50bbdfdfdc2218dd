"""Hydra reads back what is put together."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.override import override

# Of a folder's name, above all those that mean something to Hydra.
NAMES = st.text(st.sampled_from(" \t\n\"'\\()[]{}#&~=,:$/.-+%@?|*!<>;`^ß語01_aeinult") | st.characters(codec="utf-8"))


@settings(deadline=None)
@given(text=NAMES, other=NAMES)
def test_every_text_is_read_as_it_is(text, other):
    read = OverridesParser.create().parse_override
    assert read(override("a.b", text)).value() == text
    assert read(override("a.b", [text, other])).value() == [text, other]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("outputs/quickstart-20250101-120000/base", "a=outputs/quickstart-20250101-120000/base"),
        ("sqlite:////tmp/my dir/mlflow.db", "a=sqlite:////tmp/my dir/mlflow.db"),
        (["/tmp/a.parquet", "b.parquet"], "a=[/tmp/a.parquet,b.parquet]"),
        ("/tmp/größe (x)", 'a="/tmp/größe (x)"'),
        (["a,b", "c"], 'a=["a,b",c]'),
        ("null", 'a="null"'),
        ("1_000", 'a="1_000"'),
    ],
)
def test_only_what_needs_quotes_has_them(value, expected):
    assert override("a", value) == expected
