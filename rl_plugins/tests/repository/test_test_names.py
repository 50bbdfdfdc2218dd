"""Names of tests say the tested function or behaviour: no word in place of another one, and not too long."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rl_plugins.tests.repository.documentation import syntax_tree

FOLDERS = ("rl_plugins/tests", "integration_tests")
MAX_LENGTH = 90
FORBIDDEN = {
    "it", "its", "they", "them", "those", "these", "what", "who", "whoever", "somebody", "nobody", "anybody", "others",
}  # fmt: skip


def names_of_tests(tree: ast.Module) -> list[str]:
    """The names of the test functions of a module, one for each definition."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function.name for function in functions if function.name.startswith("test_")]


def faults(tree: ast.Module) -> Iterator[str]:
    """The faults in the names of the tests of a module."""
    for name, count in Counter(names_of_tests(tree)).items():
        if words := FORBIDDEN.intersection(name.split("_")):
            yield f"{name}: name the function or thing in place of {', '.join(sorted(words))}"
        if len(name) > MAX_LENGTH:
            yield f"{name}: {len(name)} characters, {MAX_LENGTH} are allowed"
        if count > 1:
            yield f"{name}: defined {count} times, and only the last definition runs"


def modules(root: Path) -> dict[str, Path]:
    """Return the modules of tests, by their paths in the repository."""
    files = [file for folder in FOLDERS for file in (root / folder).rglob("test_*.py")]
    return {str(file.relative_to(root)): file for file in sorted(files)}


def test_names_of_tests_name_the_subject_are_short_and_unique(root):
    assert [f"{path}: {fault}" for path, file in modules(root).items() for fault in faults(syntax_tree(file))] == []


def test_names_of_tests_finds_the_tests_of_this_module(root):
    here = Path(__file__).resolve()
    assert here in [file.resolve() for file in modules(root).values()]
    assert "test_names_of_tests_finds_the_tests_of_this_module" in names_of_tests(syntax_tree(here))


def test_faults_finds_forbidden_words_long_names_and_repeated_names():
    names = ["test_limits", "test_what_it_does", "test_item_is_italic", f"test_{'a' * 86}", "test_limits"]
    tree = ast.parse("".join(f"def {name}(): pass\n" for name in names))
    assert list(faults(tree)) == [
        "test_limits: defined 2 times, and only the last definition runs",
        "test_what_it_does: name the function or thing in place of it, what",
        f"test_{'a' * 86}: 91 characters, 90 are allowed",
    ]
