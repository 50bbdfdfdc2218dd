"""Registry of functions: the functions of the project, and functions of installed packages with entry points."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rl_plugins.algorithms.registry import Registry


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[object]:
    """A package on sys.path. The package adds `added` and tries to replace `own`."""
    (tmp_path / "plugin_package.py").write_text("def added():\n    return 'added'\n")
    info = tmp_path / "plugin_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-package\nVersion: 1.0\n")
    points = "added = plugin_package:added\nown = plugin_package:added\n"
    (info / "entry_points.txt").write_text(f"[rl_plugins.test_table]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Registry("rl_plugins.test_table", {"own": "own function"})


def test_registry_imports_an_entry_point_at_the_first_use(installed: Registry[object]) -> None:
    assert list(installed) == ["own", "added"] and len(installed) == 2
    assert "added" in installed and "absent" not in installed
    assert "plugin_package" not in sys.modules or sys.modules.pop("plugin_package")
    added = installed["added"]
    assert callable(added) and added() == "added"
    assert "plugin_package" in sys.modules


def test_registry_keeps_own_functions_over_entry_points(installed: Registry[object]) -> None:
    assert installed["own"] == "own function"


def test_registry_raises_key_error_for_an_unknown_name(installed: Registry[object]) -> None:
    with pytest.raises(KeyError, match="absent"):
        installed["absent"]
