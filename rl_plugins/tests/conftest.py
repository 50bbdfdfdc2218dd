"""What all unit tests share."""

import logging
import socket
from collections.abc import Generator, Iterator
from sqlite3 import Connection

import pytest
from hypothesis import HealthCheck, settings

from rl_plugins.tests.exact_norms import exact_norms
from rl_plugins.tests.ranks import await_server, start_server


def _runs_ranks(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    return module is not None and hasattr(module.obj, "run_ranks")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server of rank processes import its libraries while other tests run."""
    if any(map(_runs_ranks, session.items)):
        start_server()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for these imports before the test's time begins."""
    if _runs_ranks(item):
        await_server()
    return (yield)


# The same examples in every run, however fast the machine is.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="module")
def _exact_norms() -> Iterator[None]:
    with exact_norms():
        yield


@pytest.fixture(autouse=True)
def _levels_of_loggers() -> Iterator[None]:
    """A command that a test calls may silence libraries in its process, which is this one."""
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def refused_address() -> Iterator[str]:
    """An address of this machine where nothing listens, and where no other process can listen meanwhile."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{silent.getsockname()[1]}"


@pytest.fixture(scope="session")
def sqlite_without_sync() -> Iterator[None]:
    """Files of SQLite are not forced to the disk: MLflow does that a hundred times to make a store."""
    from sqlalchemy import Engine, event

    def set_up(connection: Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", set_up)
    yield
    event.remove(Engine, "connect", set_up)
