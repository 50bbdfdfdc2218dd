"""Stores through which processes of a run find each other, to form a group of gloo or NCCL.

A TCPStore of torch listens on all addresses of a machine, whatever host it is given, and answers everybody. Stores of
this module listen on one address, and their keys begin with a random prefix. Torch has no further protection: whoever
reaches the address can list and change the keys. So a store lives no longer than its group needs the store, and holds
no pickled objects.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_PREFIX_BYTES = 16


@dataclass(frozen=True)
class StoreAddress:
    """Address of a store. The address travels to the other processes through Ray.

    Attributes:
        host: address of the machine.
        port: port of the store.
        prefix: first part of all keys, which other processes cannot guess.
    """

    host: str
    port: int
    prefix: str


class ListeningStore:
    """Store that listens on one address until the object is deleted.

    Args:
        host: address of this machine.
        timeout_s: deadline of the store's waits, in seconds.

    Attributes:
        address: address for `join_store`.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        from torch.distributed import TCPStore

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self.address = StoreAddress(host, listener.getsockname()[1], secrets.token_hex(_PREFIX_BYTES))
        # The store closes the socket.
        self._store = TCPStore(
            host,
            self.address.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join_store(address: StoreAddress, timeout_s: float) -> Any:
    """Return a client of a listening store, for this process or another process.

    Args:
        address: address of the store.
        timeout_s: deadline of the store's waits, in seconds.
    """
    from torch.distributed import PrefixStore, TCPStore

    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(address.host, address.port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(address.prefix, store)
