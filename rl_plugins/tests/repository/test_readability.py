"""Source and pages stay readable: limits on the figures of `python -m rl_plugins.tests.readability`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.tests.readability import Prose, Source, prose_of_pages

LIMITS = {
    "what": 2.0,
    "that": 7.0,
    "they": 5.0,
    "it": 13.0,
    "indirect starts %": 3.0,
    "arguments with of %": 0.5,
    "arguments in capitals %": 0.5,
}
"""Largest figures of the prose of a room, of a folder of tests, or of a page."""
TESTS = ("rl_plugins/tests", "integration_tests")
# Made from docstrings, which have the same limits for each room.
MADE_PAGE = "docs/api.md"
STRUCTURE = {
    "longest module": 480,
    "modules with one importer in their room": 33,
    "inheritance depth": 3,
    "methods of PolicyOptimization": 43,
    "parameters annotated as Any %": 1.5,
    "class names that exist twice": 0,
}
"""Largest figures of the structure."""


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return Source(root)


def above_limits(prose: dict[str, Prose]) -> dict[str, tuple[float, float]]:
    """Return the figures above their limits: "room: figure" to value and limit."""
    return {
        f"{room}: {name}": (round(value, 1), limit)
        for room, counts in prose.items()
        for name, value in counts.figures().items()
        if value > (limit := LIMITS[name])
    }


def test_prose_of_each_room_keeps_the_limits(source: Source) -> None:
    assert above_limits(source.prose()) == {}, "room: figure, and its limit; see CONTRIBUTING.md for how to write"


def test_prose_of_the_tests_keeps_the_limits(root: Path) -> None:
    prose = {folder: Prose() for folder in TESTS}
    for folder, counts in prose.items():
        for file in (root / folder).rglob("*.py"):
            counts.add(file.read_text(encoding="utf-8"))
    assert above_limits(prose) == {}, "folder: figure, and its limit; see CONTRIBUTING.md for how to write"


def test_prose_of_each_page_keeps_the_limits(root: Path) -> None:
    pages = {page: prose for page, prose in prose_of_pages(root).items() if page != MADE_PAGE}
    assert above_limits(pages) == {}, "page: figure, and its limit; see CONTRIBUTING.md for how to write"


def test_structure_keeps_the_limits(source: Source) -> None:
    figures = source.structure()
    assert {name: figures[name] for name, limit in STRUCTURE.items() if figures[name] > limit} == {}


def test_figures_of_prose_count_words_starts_and_arguments() -> None:
    prose = Prose()
    prose.add(
        '"""What they keep."""\n\n\ndef half(number: int) -> int:\n    """Return it.\n\n    Args:\n'
        "        number: of x.\n        other: `that` number.\n        third: True number.\n        last: Number.\n"
        '    """\n    # that\n    return number // 2\n'
    )
    assert (prose.docstrings, prose.indirect_starts) == (2, 1)
    assert (prose.arguments, prose.arguments_starting_with_of, prose.arguments_in_capitals) == (4, 1, 1)
    assert prose.words["what"] == prose.words["they"] == prose.words["that"] == prose.words["it"] == 1
    assert prose.figures()["indirect starts %"] == 50


def test_prose_of_a_page_leaves_out_code_and_made_tables() -> None:
    prose = Prose()
    prose.add_page(
        "# That title\n\n`it` [link](it.md)\n\n```python\nit\n```\n\n- item\n\n  ```bash\n  it\n  ```\n\n"
        "<!-- rows -->\n| it |\n<!-- end rows -->\n\n| them |\n"
    )
    assert sorted(prose.words) == ["code", "item", "link", "that", "them", "title"]
