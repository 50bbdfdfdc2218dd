"""Cases of a test in two tiers: some run in `make test`, and all run in `make test-all`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], core: Container[Any]) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`. A case that is not in `core` has the mark `extended`.

    Args:
        cases: values, or tuples with one value for each name.
        core: cases of `make test`.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in core else pytest.mark.extended
        )
        for case in cases
    ]
