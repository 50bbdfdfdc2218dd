"""What all unit tests share."""

from collections.abc import Iterator

import pytest

from rl_plugins.tests.exact_norms import exact_norms


@pytest.fixture(autouse=True, scope="module")
def _exact_norms() -> Iterator[None]:
    with exact_norms():
        yield
