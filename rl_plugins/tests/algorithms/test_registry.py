"""Tables of functions: the project's own, and those that installed packages add through entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rl_plugins.algorithms.registry import Table


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table[object]:
    """A package on sys.path that adds `theirs` and tries to replace `own`."""
    (tmp_path / "their_package.py").write_text("def theirs():\n    return 'theirs'\n")
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    points = "theirs = their_package:theirs\nown = their_package:theirs\n"
    (info / "entry_points.txt").write_text(f"[rl_plugins.test_table]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Table("rl_plugins.test_table", {"own": "ours"})


def test_an_entry_point_adds_a_function_and_is_imported_when_it_is_used(installed: Table[object]) -> None:
    assert list(installed) == ["own", "theirs"] and len(installed) == 2
    assert "theirs" in installed and "nobody" not in installed
    assert "their_package" not in sys.modules or sys.modules.pop("their_package")
    theirs = installed["theirs"]
    assert callable(theirs) and theirs() == "theirs"
    assert "their_package" in sys.modules


def test_an_entry_point_cannot_replace_what_is_there(installed: Table[object]) -> None:
    assert installed["own"] == "ours"


def test_an_unknown_name(installed: Table[object]) -> None:
    with pytest.raises(KeyError, match="nobody"):
        installed["nobody"]
