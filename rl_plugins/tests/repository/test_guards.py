"""The generic folder names can be imported under rl_plugins only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FOLDERS = ["strategies", "callbacks", "recipes"]


def run_python(root, code):
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_import_of_a_bare_folder_is_refused_with_the_right_name(root, folder):
    outcome = run_python(root, f"import {folder}")
    assert outcome.returncode == 1
    assert f"ImportError: Import rl_plugins.{folder}" in outcome.stderr


def test_import_by_the_full_name_uses_the_top_level_folder(root):
    code = "".join(
        f"import os, rl_plugins.{folder} as module; print(os.path.realpath(module.__file__));" for folder in FOLDERS
    )
    outcome = run_python(root, code)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split() == [str(root.resolve() / folder / "__init__.py") for folder in FOLDERS]
