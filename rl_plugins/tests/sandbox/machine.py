"""Abilities of the machine that runs the tests."""

from __future__ import annotations

from functools import cache

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.sandbox.sandbox import CodeSandbox


@cache
def _refusal() -> str:
    try:
        with CodeSandbox("namespaces"):
            return ""
    except ConfigError as error:
        return str(error)


def skip_without_namespaces() -> None:
    """Skip the test on a machine that does not allow a sandbox of namespaces."""
    if reason := _refusal():
        pytest.skip(reason)
