"""The tables of tiers in CONTRIBUTING.md name every module with extended tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROW = re.compile(r"^\| `(test_\w+)` \| ([a-z, ]+) \| (.+) \|$", re.MULTILINE)
PARTLY = re.compile(r"^\| (`test_\w+`(?:, `test_\w+`)*) \| [^|]+ \|$", re.MULTILINE)
MARKS = ("mark.extended", "tiered(")


def tiers(file: Path) -> str:
    """Return the tiers of the tests in a module, from the module's marks."""
    text = file.read_text(encoding="utf-8")
    if re.search(r"^pytestmark = .*mark\.extended", text, re.MULTILINE):
        return "extended"
    tests = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"]
    marked = ["pytest.mark.extended" in map(ast.unparse, test.decorator_list) for test in tests]
    return "extended" if all(marked) else "core, extended" if any(mark in text for mark in MARKS) else "core"


def test_contributing_names_the_tiers_of_every_integration_module(root: Path) -> None:
    rows = ROW.findall((root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    written = {module: tier for module, tier, _ in rows}
    assert len(written) == len(rows), "a module is named twice"
    assert written == {file.stem: tiers(file) for file in (root / "integration_tests").glob("test_*.py")}


def test_contributing_names_every_unit_module_with_extended_tests(root: Path) -> None:
    found = PARTLY.findall(
        (root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("modules of integration")[0]
    )
    files = [file for file in (root / "rl_plugins" / "tests").rglob("test_*.py") if file != Path(__file__)]
    assert sorted(re.findall(r"test_\w+", " ".join(found))) == sorted(
        file.stem for file in files if tiers(file) == "core, extended"
    )
