"""The figures of docs/architecture.md equal the figures of the code."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.tests.repository.documentation import figures


@pytest.fixture(scope="module")
def recorder() -> Any:
    """The calls of a step."""
    return figures().record_step()


def test_packages_figure_has_the_imports_of_the_source() -> None:
    assert figures().packages_figure() in figures().PAGE.read_text(encoding="utf-8"), "run python docs/figures.py"


def test_step_figure_has_the_calls_of_a_step(recorder: Any) -> None:
    assert figures().step_figure(recorder) in figures().PAGE.read_text(encoding="utf-8"), "run python docs/figures.py"


def test_step_has_functions_in_at_most_47_files(recorder: Any) -> None:
    assert len(recorder.functions) <= 47, sorted(recorder.functions)


def test_architecture_has_at_most_1500_words() -> None:
    assert len(figures().PAGE.read_text(encoding="utf-8").split()) <= 1500
