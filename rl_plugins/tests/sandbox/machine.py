"""Abilities of the machine of the tests."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest

_PROBE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "true"]


@cache
def _has_namespaces() -> bool:
    """Ask another program than the sandbox, so that a faulty sandbox fails its tests."""
    return shutil.which("unshare") is not None and subprocess.run(_PROBE, capture_output=True).returncode == 0


def skip_without_namespaces() -> None:
    """Skip the test on a machine without namespaces."""
    if not _has_namespaces():
        pytest.skip("this machine does not allow user namespaces")
