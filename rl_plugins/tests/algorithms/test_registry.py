"""Tables of functions: the project's own, and those that installed packages add through entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rl_plugins.algorithms.registry import Table


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table[object]:
    """A package on sys.path that adds `added` and tries to replace `own`."""
    (tmp_path / "plugin_package.py").write_text("def added():\n    return 'added'\n")
    info = tmp_path / "plugin_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-package\nVersion: 1.0\n")
    points = "added = plugin_package:added\nown = plugin_package:added\n"
    (info / "entry_points.txt").write_text(f"[rl_plugins.test_table]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Table("rl_plugins.test_table", {"own": "ours"})


def test_table_imports_an_entry_point_at_the_first_use(installed: Table[object]) -> None:
    assert list(installed) == ["own", "added"] and len(installed) == 2
    assert "added" in installed and "absent" not in installed
    assert "plugin_package" not in sys.modules or sys.modules.pop("plugin_package")
    added = installed["added"]
    assert callable(added) and added() == "added"
    assert "plugin_package" in sys.modules


def test_table_keeps_own_functions_over_entry_points(installed: Table[object]) -> None:
    assert installed["own"] == "ours"


def test_table_raises_key_error_for_an_unknown_name(installed: Table[object]) -> None:
    with pytest.raises(KeyError, match="absent"):
        installed["absent"]
