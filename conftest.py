"""Gives each test its tier by its folder, and scales the deadlines of tests by TEST_TIME_SCALE."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rl_plugins.tests.patience import TIME_SCALE, patient
from rl_plugins.tests.shell_variables import ask_no_proxy_for_this_machine, forget_servers

pytest_plugins = ["pytester", "rl_plugins.tests.time_limits"]

if TYPE_CHECKING:
    from integration_tests.scheduling import FileScheduling

INTEGRATION_TESTS = Path(__file__).parent / "integration_tests"

forget_servers(os.environ)
ask_no_proxy_for_this_machine(os.environ)

# Imported objects stay until the end. The collector would search them during the collection of tests, in each test and
# at the end of the process: 7 s of 17 s without any test.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FileScheduling:
    from integration_tests.scheduling import FileScheduling

    return FileScheduling(config, log)


@pytest.fixture(autouse=True)
def _levels_of_loggers() -> Iterator[None]:
    """Restore the levels of loggers: a command in the test's process may silence libraries."""
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(INTEGRATION_TESTS):
            item.add_marker("integration")
        elif not any(item.get_closest_marker(tier) for tier in ("integration", "gpu")):
            item.add_marker("unit")
        own = item.get_closest_marker("timeout")
        if own is not None and TIME_SCALE != 1:
            item.add_marker(pytest.mark.timeout(patient(own.args[0])), append=False)
