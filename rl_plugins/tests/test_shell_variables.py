"""Tests meet no server, cluster or proxy of the developer's shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch
from urllib.request import proxy_bypass

from rl_plugins.tests.shell_variables import OF_SERVERS, ask_no_proxy_for_this_machine

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


def test_servers_of_tests_are_asked_without_the_proxy_of_the_developer() -> None:
    own = "127.0.0.1,127.0.0.2,localhost"
    variables = variables_of_tests(NO_PROXY="10.0.0.1", no_proxy="")
    assert (variables["NO_PROXY"], variables["no_proxy"]) == (f"10.0.0.1,{own}", own)
    exported = {"http_proxy": "http://proxy:3128", "NO_PROXY": variables["NO_PROXY"], "no_proxy": "example.org"}
    ask_no_proxy_for_this_machine(exported)
    with patch.dict(os.environ, exported):
        hosts = ("127.0.0.1", "localhost", "example.org", "example.com")
        assert [bool(proxy_bypass(host)) for host in hosts] == [True, True, True, False]
