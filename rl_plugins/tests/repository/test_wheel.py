"""The wheel holds every module and configuration file of the tree, under rl_plugins and nowhere else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOP_LEVEL_ROOMS = ("callbacks", "recipes", "strategies")
SUFFIXES = {".py", ".pyi", ".yaml", ".json", ".html", ".typed"}


def shipped(root: Path) -> set[str]:
    """The names, in a wheel, of the tree's files with one of the suffixes, without the tests."""
    names = set()
    for top in ("rl_plugins", *TOP_LEVEL_ROOMS):
        for file in (root / top).rglob("*"):
            parts = file.relative_to(root).parts
            # rglob enters the links on some versions of Python.
            behind_a_link = parts[0] == "rl_plugins" and parts[1] in TOP_LEVEL_ROOMS
            if file.suffix in SUFFIXES and not behind_a_link and parts[:2] != ("rl_plugins", "tests"):
                names.add("/".join(parts if parts[0] == "rl_plugins" else ("rl_plugins", *parts)))
    return names


@pytest.fixture(scope="module")
def wheel_names(root, tmp_path_factory) -> set[str]:
    # A build leaves its products in the tree, and therefore gets a copy of the tree.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    for name in ("rl_plugins", *TOP_LEVEL_ROOMS):
        shutil.copytree(root / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    wheels = tmp_path_factory.mktemp("wheels")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(wheels),
        str(source),
    ]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_the_files_of_the_tree(root, wheel_names):
    found = {name for name in wheel_names if ".dist-info/" not in name}
    expected = shipped(root)
    # Type checkers take a mark in the top folder for all packages below.
    assert {"rl_plugins/strategies/__init__.py", "rl_plugins/py.typed"} <= expected
    assert expected - found == set(), "list the package (or its files) in pyproject.toml"
    assert found - expected == set()


def test_wheel_installs_nothing_beside_rl_plugins(wheel_names):
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rl_plugins"}
