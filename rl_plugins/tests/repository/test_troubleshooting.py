"""The code contains the messages quoted in docs/troubleshooting.md, and every expired deadline has an entry."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

import pytest

from rl_plugins.tests.repository.documentation import WRITTEN, sources, syntax_tree, text_of

PAGE = WRITTEN["docs/troubleshooting.md"]


class Texts(NamedTuple):
    """Texts of the code: all texts, and the texts of `DeadlineExceeded`."""

    known: set[str]
    of_deadlines: list[str]


@pytest.fixture(scope="module")
def texts() -> Texts:
    found = Texts(set(), [])
    for path in sources():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.expr) and (text := text_of(node)):
                found.known.add(text)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DeadlineExceeded" and node.args:
                found.of_deadlines.extend(filter(None, [text_of(node.args[0])]))
    return found


def quoted() -> list[str]:
    """Return the entries with messages."""
    return [quote.strip("` ") for quote in re.findall(r"^(`+.+`+)\n:   ", PAGE, re.MULTILINE)]


def test_messages_quoted_in_troubleshooting_stand_in_the_code(texts):
    assert len(quoted()) > 25
    assert [quote for quote in quoted() if not any(quote in text for text in texts.known)] == []


def test_troubleshooting_has_an_entry_for_every_deadline_exceeded(texts):
    assert len(texts.of_deadlines) > 3
    assert [text for text in texts.of_deadlines if text not in quoted()] == []
