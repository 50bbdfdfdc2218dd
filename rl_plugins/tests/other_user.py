"""Programs of another user of the machine, for tests of attacks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rl_plugins.tests.patience import patient

OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")

# The interpreter may be readable for root only, so the program changes its user after the start.
CHANGE_USER = f"import os; os.setgroups([]); os.setgid({OTHER_USER}); os.setuid({OTHER_USER})"


def start_as_other_user(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python program as user 65534, without the packages of the environment.

    Args:
        program: text of the program. The names `os`, `socket` and `sys` are imported.
        arguments: values of `sys.argv[1:]`.
    """
    text = f"import socket, sys\n{CHANGE_USER}\n{program}"
    command = [sys.executable, "-I", "-S", "-c", text, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")


def run_as_other_user(program: str, *arguments: str) -> str:
    """Return the output of a program of `start_as_other_user`."""
    process = start_as_other_user(program, *arguments)
    output, _ = process.communicate(timeout=patient(30))
    assert process.returncode == 0
    return output
