"""A process imports its libraries without collections of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rl_plugins.garbage_collection import garbage_collector_off


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    if not was_on:
        gc.disable()


def test_collector_off_freezes_the_objects_of_the_block() -> None:
    before = gc.get_freeze_count()
    with garbage_collector_off():
        assert not gc.isenabled()
        stays = [[number] for number in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(stays)


def test_collector_off_leaves_a_collector_off_that_was_off() -> None:
    gc.disable()
    with garbage_collector_off():
        pass
    assert not gc.isenabled()


def test_collector_is_on_after_an_error_in_a_decorated_function() -> None:
    @garbage_collector_off()
    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert gc.isenabled()
