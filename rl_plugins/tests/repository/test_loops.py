"""The loops of tests over cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.tests.loops import for_each


def test_for_each_calls_the_test_with_every_combination_of_cases_and_with_fixtures(tmp_path: Path) -> None:
    calls = []

    @for_each(("low", "high"), [(1, 2), (3, 4)])
    @for_each("scale", ["a", "b"])
    def check(tmp_path: Path, low: int, high: int, scale: str) -> None:
        calls.append((low, high, scale))

    check(tmp_path=tmp_path)
    assert calls == [(1, 2, "a"), (1, 2, "b"), (3, 4, "a"), (3, 4, "b")]


def test_for_each_names_the_case_that_fails() -> None:
    @for_each("seed", range(3))
    @for_each("scale", ["group", "batch"])
    def check(seed: int, scale: str) -> None:
        assert (seed, scale) != (1, "batch")

    with pytest.raises(AssertionError) as raised:
        check()
    assert raised.value.__notes__ == ["in the case: scale='batch'", "in the case: seed=1"]


def test_for_each_refuses_an_empty_loop() -> None:
    with pytest.raises(AssertionError, match="there is no case of seed"):
        for_each("seed", range(0))
