"""Gives each test its tier and its group, and scales the deadlines of tests by TEST_TIME_SCALE.

With `--dist loadgroup`, one process of pytest runs the tests of a group: a file, all files with the resident Ray, or
all files marked `xdist_group("large")`, whose runs have many processes and would not fit into memory together.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.tests.patience import TIME_SCALE, patient

pytest_plugins = ["pytester", "rl_plugins.tests.time_limits"]

INTEGRATION_TESTS = Path(__file__).parent / "integration_tests"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.timeout is not None:
        config.option.timeout = patient(config.option.timeout)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with_ray = {item.path for item in items if "running_ray" in getattr(item, "fixturenames", ())}
    for item in items:
        if item.path.is_relative_to(INTEGRATION_TESTS):
            item.add_marker("integration")
        elif not any(item.get_closest_marker(tier) for tier in ("integration", "gpu")):
            item.add_marker("unit")
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("ray" if item.path in with_ray else item.nodeid.partition("::")[0]))
        own = item.get_closest_marker("timeout")
        if own is not None and TIME_SCALE != 1:
            item.add_marker(pytest.mark.timeout(patient(own.args[0])), append=False)
