from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.launch.compose import override

# Characters in names of folders, above all characters with a meaning in Hydra's grammar.
NAMES = st.text(st.sampled_from(" \t\n\"'\\()[]{}#&~=,:$/.-+%@?|*!<>;`^ß語01_aeinult") | st.characters(codec="utf-8"))


@settings(deadline=None)
@given(text=NAMES, other=NAMES)
def test_hydra_reads_the_text_of_an_override_unchanged(text, other):
    read = OverridesParser.create().parse_override
    assert read(override("a.b", text)).value() == text
    assert read(override("a.b", [text, other])).value() == [text, other]


@settings(deadline=None, max_examples=20)
@given(text=NAMES)
def test_hydra_reads_the_mapping_of_an_override_unchanged(text):
    mapping = {"_target_": "a.b", "args": {"words": [text], "word": text, "level": 2, "fast": True, "seed": None}}
    assert OverridesParser.create().parse_override(override("a.b", mapping)).value() == mapping


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
def test_override_quotes_only_a_text_that_needs_quotes(value, expected):
    assert override("a", value) == expected
