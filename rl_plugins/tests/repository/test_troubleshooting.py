"""The messages that docs/troubleshooting.md quotes are those of the code, and every expired deadline has an entry."""

from __future__ import annotations

import ast
import re

import pytest

from rl_plugins.tests.repository.documentation import WRITTEN, sources, syntax_tree, text_of

PAGE = WRITTEN["docs/troubleshooting.md"]


@pytest.fixture(scope="module")
def nodes() -> list[ast.AST]:
    return [node for path in sources() for node in ast.walk(syntax_tree(path))]


def quoted() -> list[str]:
    """The entries that are messages."""
    return [quote.strip("` ") for quote in re.findall(r"^(`+.+`+)\n:   ", PAGE, re.MULTILINE)]


def test_messages_quoted_in_troubleshooting_stand_in_the_code(nodes):
    known = {text for node in nodes if isinstance(node, ast.expr) and (text := text_of(node))}
    assert len(quoted()) > 25
    assert [quote for quote in quoted() if not any(quote in text for text in known)] == []


def test_troubleshooting_has_an_entry_for_every_deadline_exceeded(nodes):
    raised = [
        text
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "DeadlineExceeded" and node.args
        if (text := text_of(node.args[0]))
    ]
    assert len(raised) > 3
    assert [text for text in raised if text not in quoted()] == []
