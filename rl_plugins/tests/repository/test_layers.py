"""A package imports from its own layer and from lower layers, never in a circle (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rl_plugins.tests.repository.documentation import figures, syntax_tree

LAYERS = {package: number for number, packages in enumerate(reversed(figures().LAYERS), 1) for package in packages}
TOP_LEVEL_PACKAGES = ("callbacks", "recipes", "strategies")


def package_of(module: str) -> str | None:
    """Return the package of `rl_plugins.<package>...`; None on the ground layer (the root and its single modules)."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else None


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of every import of the project in a file, imports inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "rl_plugins")


@pytest.fixture(scope="module")
def crossings(root: Path) -> list[tuple[str, str | None, str | None]]:
    """Yield place, own package and imported package of every import from another package."""
    folders = [root / package if package in TOP_LEVEL_PACKAGES else root / "rl_plugins" / package for package in LAYERS]
    # `python -m rl_plugins` is a door from outside, above all layers.
    files = [
        *(file for file in (root / "rl_plugins").glob("*.py") if file.name != "__main__.py"),
        *(file for folder in folders for file in folder.rglob("*.py")),
    ]
    found = []
    for file in sorted(files):
        first, *rest = file.relative_to(root).parts
        own = first if first in TOP_LEVEL_PACKAGES else package_of(f"{first}.{rest[0]}")
        for line, module in imported_modules(syntax_tree(file)):
            if package_of(module) != own:
                found.append((f"{file.relative_to(root)}:{line}", own, package_of(module)))
    return found


def test_layers_name_every_package(root):
    folders = {p.name for p in (root / "rl_plugins").iterdir() if p.is_dir() and p.name[0] not in "._"}
    assert folders - {"tests"} == set(LAYERS)


def test_imports_never_go_up(crossings):
    upward = [
        f"{place}: {own} imports {other}"
        for place, own, other in crossings
        if LAYERS.get(other or "", 0) > LAYERS.get(own or "", 0)
    ]
    assert upward == []


def test_packages_import_no_package_in_a_circle(crossings):
    graph: dict[str, set[str]] = {package: set() for package in LAYERS}
    for _, own, other in crossings:
        if own and other:
            graph[own].add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle of packages: {' -> '.join(error.args[1])}")


def test_imported_modules_finds_every_form_of_import():
    source = """
import rl_plugins.data.prompts as prompts
from rl_plugins import stages
def late():
    from rl_plugins.launch.scorer import scorer_of
import torch
"""
    assert [package_of(module) for _, module in imported_modules(ast.parse(source))] == ["data", "stages", "launch"]
    assert package_of("rl_plugins.errors.ConfigError") is None
