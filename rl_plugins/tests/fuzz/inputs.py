"""Strategies of bad input: good input with a few changes, such as other values, missing keys, or changed bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

Path_ = tuple[Any, ...]
Change = tuple[Path_, Any]
_REMOVED = object()

NUMBERS = (
    st.sampled_from([0, -1, 1, 2, 1.5, math.nan, math.inf, -math.inf, 10**30, -(10**30), 1e300, True, 2**63])
    | st.integers()
    | st.floats()
)
TEXTS = st.text(max_size=8) | st.sampled_from(
    ["", " ", "???", "${a.b}", "${", "\n", "\x1b[2J", "1e9", "null", "x" * 500]
)
_SIMPLE = st.none() | NUMBERS | TEXTS
VALUES = st.recursive(
    _SIMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths_of(value: Any, above: Path_ = ()) -> list[Path_]:
    """Return the paths of all values inside mappings and lists."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in [(*above, key), *paths_of(inner, (*above, key))]]


def changed(base: Any, values: st.SearchStrategy[Any] = VALUES) -> st.SearchStrategy[Any]:
    """Return the strategy of a value with one to three inner values replaced or removed."""
    changes = st.tuples(st.sampled_from(paths_of(base)), values | st.just(_REMOVED))
    return st.lists(changes, min_size=1, max_size=3).map(lambda some: _with_changes(base, some))


def _with_changes(base: Any, changes: Sequence[Change]) -> Any:
    whole: Any = deepcopy(base)
    for path, value in changes:
        node: Any = whole
        for key in path[:-1]:
            node = node[key] if isinstance(node, dict | list) and _has(node, key) else None
        if isinstance(node, dict | list) and _has(node, path[-1]):
            if value is _REMOVED:
                del node[path[-1]]
            else:
                node[path[-1]] = value
    return whole


def _has(node: Any, key: str | int) -> bool:
    return key in node if isinstance(node, dict) else isinstance(key, int) and key < len(node)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the strategy of a file with changed bytes, with bytes cut off, or with other content."""
    kind = draw(st.sampled_from(["flip", "cut", "other"]))
    if kind == "cut":
        return content[: draw(st.integers(0, len(content) - 1))]
    if kind == "other":
        return draw(st.binary(max_size=64))
    harmed = bytearray(content)
    # Most faults are at the ends, where headers are.
    position = st.integers(0, len(content) - 1) | st.integers(0, min(99, len(content) - 1))
    position |= st.integers(max(0, len(content) - 100), len(content) - 1)
    for place, mask in draw(st.lists(st.tuples(position, st.integers(1, 255)), min_size=1, max_size=4)):
        harmed[place] ^= mask
    return bytes(harmed)


def as_json(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Return the strategy of JSON files with the values."""
    return values.map(lambda value: json.dumps(value).encode())
