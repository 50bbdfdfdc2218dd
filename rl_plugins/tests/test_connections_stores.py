"""Stores of a run listen on one address, and a stranger's keys do not meet the keys of the run."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from rl_plugins.connections import ListeningStore, join_store
from rl_plugins.tests.listeners import listening_hosts
from rl_plugins.tests.patience import patient

DEADLINE_S = patient(30)


@pytest.fixture
def store() -> ListeningStore:
    return ListeningStore("127.0.0.1", DEADLINE_S)


def test_listening_store_listens_on_one_address(store: ListeningStore) -> None:
    assert listening_hosts(store.address.port) == ["127.0.0.1"]


def test_processes_with_the_address_share_the_keys(store: ListeningStore) -> None:
    one, other = (join_store(store.address, DEADLINE_S) for _ in range(2))
    one.set("rank 0", "here")
    assert other.get("rank 0") == b"here"


def test_keys_of_a_stranger_do_not_meet_the_keys_of_the_run(store: ListeningStore) -> None:
    host, port = store.address.host, store.address.port
    stranger = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=DEADLINE_S), wait_for_workers=False)
    for key in ("rank 0", "weights/rank 0"):
        stranger.set(key, "elsewhere")
    joined = join_store(store.address, DEADLINE_S)
    assert not joined.check(["rank 0"])
    joined.set("rank 0", "here")
    stranger.set("rank 0", "elsewhere")
    assert joined.get("rank 0") == b"here" and not stranger.check(["rank 1"])


def test_stores_have_different_prefixes(store: ListeningStore) -> None:
    other = ListeningStore("127.0.0.1", DEADLINE_S)
    assert len(store.address.prefix) == 32 and store.address.prefix != other.address.prefix


def test_listening_store_ends_with_the_object() -> None:
    store = ListeningStore("127.0.0.1", DEADLINE_S)
    port = store.address.port
    assert listening_hosts(port)
    del store
    assert not listening_hosts(port)
