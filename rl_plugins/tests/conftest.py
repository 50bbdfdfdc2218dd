"""What all unit tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from rl_plugins.tests.exact_norms import exact_norms

# The same examples in every run, however fast the machine is.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="module")
def _exact_norms() -> Iterator[None]:
    with exact_norms():
        yield
