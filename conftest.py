"""Gives each test its tier, so that `-m unit` and `-m integration` name everything there is."""

from __future__ import annotations

from pathlib import Path

import pytest

INTEGRATION_TESTS = Path(__file__).parent / "integration_tests"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(INTEGRATION_TESTS):
            if not item.get_closest_marker("outage"):
                item.add_marker("integration")
        elif not any(item.get_closest_marker(tier) for tier in ("integration", "gpu")):
            item.add_marker("unit")
