"""Fixtures of all unit tests."""

import signal
import socket
import sys
from collections.abc import Generator, Iterator
from sqlite3 import Connection
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from rl_plugins.tests.exact_norms import exact_norms
from rl_plugins.tests.ranks import await_server, start_server
from rl_plugins.user_code import SoftDeadline


def _runs_ranks(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    return module is not None and hasattr(module.obj, "run_ranks")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server of rank processes import its libraries while other tests run."""
    if any(map(_runs_ranks, session.items)):
        start_server()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the server's imports before the test's time begins."""
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


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Let signals have their default effect: a shell that starts the tests in the background ignores some signals."""
    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _alarms_in_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test pass if the alarm of a reward meets a finalizer: Python drops the exception there."""
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not SoftDeadline:
            report(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", report_others)


@pytest.fixture
def refused_address() -> Iterator[str]:
    """An address of this machine without a listener. No other process can listen there meanwhile."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{silent.getsockname()[1]}"


@pytest.fixture(scope="session")
def sqlite_without_sync() -> Iterator[None]:
    """Let SQLite write without a flush to disk: MLflow flushes a hundred times for a new store."""
    from sqlalchemy import Engine, event

    def set_up(connection: Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", set_up)
    yield
    event.remove(Engine, "connect", set_up)
