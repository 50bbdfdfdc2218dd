"""Tests meet no server, cluster or proxy of the developer's shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rl_plugins.tests.shell_variables import OF_SERVERS

ROOT = Path(__file__).parents[2]


def variables_of_tests(**exported: str) -> dict[str, str]:
    """Return the environment after the import of the tests' first conftest.py, in a shell with exported variables."""
    shown = subprocess.run(
        [sys.executable, "-c", "import json, os, conftest; print(json.dumps(dict(os.environ)))"],
        cwd=ROOT, env={**os.environ, **exported}, check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    variables: dict[str, str] = json.loads(shown)
    return variables


def test_tests_have_no_variable_of_a_server_of_the_developer() -> None:
    exported = dict.fromkeys(OF_SERVERS, "http://somewhere:5000")
    assert {"RAY_ADDRESS", "MLFLOW_TRACKING_URI"} < exported.keys()
    assert exported.keys().isdisjoint(variables_of_tests(**exported))
