"""End of a group of NCCL: engines wait in a store of rank 0, over real stores and without NCCL."""

from __future__ import annotations

from datetime import timedelta
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from torch.distributed import DistStoreError

from rl_plugins.connections import ListeningStore, join_store
from rl_plugins.rollout.vllm import nccl
from rl_plugins.tests.patience import patient, wait_until

DEADLINE_S = patient(60)


class CountedStore:
    """A client of a store, which counts the waits."""

    def __init__(self, store: Any) -> None:
        self._store, self.waits = store, 0

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        # Torch casts milliseconds to a C int.
        assert timeout / timedelta(milliseconds=1) < 2**31
        self.waits += 1
        self._store.wait(keys, timeout)


@pytest.mark.parametrize("end", ["rank 0 ends the group", "the store is lost"])
def test_engines_abort_at_the_end_of_the_group_and_not_after_a_turn_of_waiting(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[Any] = []
    monkeypatch.setattr(nccl, "_TURN", timedelta(milliseconds=20))
    monkeypatch.setattr(nccl, "_abort", aborted.append)
    listening = ListeningStore("127.0.0.1", DEADLINE_S)
    store, communicator = CountedStore(join_store(listening.address, DEADLINE_S)), SimpleNamespace(disabled=False)
    waiting = Thread(target=nccl._abort_at_end, args=(communicator, store), daemon=True)
    waiting.start()
    wait_until(lambda: store.waits >= 3 or not waiting.is_alive(), "three turns of waiting")
    assert aborted == []
    if end == "the store is lost":
        del listening
    else:
        join_store(listening.address, DEADLINE_S).set(nccl._END, "")
    waiting.join(DEADLINE_S)
    assert aborted == [communicator]


def test_failure_of_the_store_ends_the_group_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[Any] = []
    waits = []

    class FailingStore:
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            waits.append(keys)
            assert len(waits) < 3, "an engine must not ask a failed store again and again"
            raise DistStoreError("the store failed")

    communicator: Any = SimpleNamespace(disabled=False)
    store: Any = FailingStore()
    monkeypatch.setattr(nccl, "_abort", aborted.append)
    with pytest.raises(DistStoreError, match="the store failed"):
        nccl._abort_at_end(communicator, store)
    assert aborted == [communicator] and len(waits) == 1
