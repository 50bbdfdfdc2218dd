"""One property, many cases: a decorator that loops inside one test. A failure names the case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from rl_plugins.tests.cases import case

Test = Callable[..., None]


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test function once for each case, as one test of pytest.

    The decorator reads like `pytest.mark.parametrize`, and is for cases with different numbers only: the work of pytest
    for one item takes longer than most of these cases. Fixtures are made once for all cases.

    Args:
        names: names of the test function's arguments for the cases: one, or several.
        cases: values: one for each case, or tuples with one value for each name.
    """
    keys = (names,) if isinstance(names, str) else names
    rows = [(values,) if isinstance(names, str) else tuple(values) for values in cases]
    assert rows, f"there is no case of {', '.join(keys)}"

    def decorate(test: Test) -> Test:
        whole = inspect.signature(test)
        assert set(keys) <= set(whole.parameters), f"{test.__name__} takes no {', '.join(keys)}"
        without_case = whole.replace(parameters=[p for key, p in whole.parameters.items() if key not in keys])

        @functools.wraps(test)
        def all_cases(*arguments: Any, **keywords: Any) -> None:
            others = without_case.bind(*arguments, **keywords).arguments
            for row in rows:
                values = dict(zip(keys, row, strict=True))
                with case(", ".join(f"{key}={value!r}" for key, value in values.items())):
                    test(**others, **values)

        all_cases.__signature__ = without_case  # type: ignore[attr-defined]
        return all_cases

    return decorate
