"""What all unit tests share."""

from collections.abc import Generator, Iterator

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
