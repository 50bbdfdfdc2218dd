"""The names of `rl_plugins`, and names of methods in docstrings and pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rl_plugins
from rl_plugins.tests.cases import case


def test_public_names_are_loaded_from_the_modules_that_define_the_names():
    for name, module in rl_plugins._MODULES.items():
        with case(name):
            found = getattr(rl_plugins, name)
            assert (found.__name__, found.__module__) == (name, f"rl_plugins.{module}")
            assert name in dir(rl_plugins)


def test_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'rl_plugins' has no attribute 'Policy'"):
        _ = rl_plugins.Policy  # type: ignore[attr-defined]


MEMBER = re.compile(r"`(?:rl\.)?([A-Z]\w+)\.([a-z_]\w*)(?:\([^`]*\))?`")


def members_of(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of the methods, fields and attributes of a class."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


def test_docstrings_and_pages_name_members_that_exist(root: Path) -> None:
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    folders = [root / "rl_plugins", *((root / name) for name in ("strategies", "callbacks", "recipes"))]
    files = [file for folder in folders for file in folder.rglob("*.py") if "tests" not in file.parts]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(members_of(node))
                bases.setdefault(node.name, set()).update(ast.unparse(base).partition("[")[0] for base in node.bases)

    def has(name: str, member: str) -> bool:
        """Return True also for a class with a base of another library."""
        return name not in members or member in members[name] or any(has(base, member) for base in bases[name])

    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    texts |= {page: page.read_text(encoding="utf-8") for page in pages}
    named = {
        (file.name, *found) for file, text in texts.items() for found in MEMBER.findall(text) if found[0] in members
    }
    assert len(named) > 50
    assert [entry for entry in sorted(named) if not has(*entry[1:])] == []
