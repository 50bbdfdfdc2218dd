"""The figures of docs/architecture.md equal the figures of the code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def figures() -> Any:
    """The module docs/figures.py."""
    file = Path(__file__).resolve().parents[3] / "docs" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the program look up the module.
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recorder(figures: Any) -> Any:
    """The calls of a step."""
    return figures.record_step()


def test_rooms_figure_has_the_imports_of_the_source(figures: Any) -> None:
    assert figures.rooms_figure() in figures.PAGE.read_text(encoding="utf-8"), "run python docs/figures.py"


def test_step_figure_has_the_calls_of_a_step(figures: Any, recorder: Any) -> None:
    assert figures.step_figure(recorder) in figures.PAGE.read_text(encoding="utf-8"), "run python docs/figures.py"


def test_step_has_functions_in_at_most_51_files(recorder: Any) -> None:
    assert len(recorder.functions) <= 51, sorted(recorder.functions)


def test_architecture_has_at_most_1500_words(figures: Any) -> None:
    assert len(figures.PAGE.read_text(encoding="utf-8").split()) <= 1500
