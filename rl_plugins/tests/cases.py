"""Many cases in one test: an error names its case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(name: object) -> Iterator[None]:
    """Add the name of a case to every exception raised in the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {name}")
        raise
