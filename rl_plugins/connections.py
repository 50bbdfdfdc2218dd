"""Connections between the processes of a run. No other process takes part.

Processes find each other through a store, to form a group of gloo or NCCL. A TCPStore of torch listens on all addresses
of a machine, whatever host it is given, and answers everybody. Stores of this module listen on one address, and their
keys begin with a random prefix. Torch has no further protection: whoever reaches the address can list and change the
keys. So a store lives no longer than its group needs the store, and holds no pickled objects.

Training ranks reach a process of an engine on the same machine through a Unix socket. An abstract Unix socket has no
permissions: all users of a machine see the name and can connect. Therefore each side asks the kernel for the user of
the other side, and a rank sends a secret that has reached the rank through Ray. A thread of the engine answers new
connections until all ranks have connected, and then closes the socket. So a wrong or silent connection delays no rank.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from rl_plugins.errors import DeadlineExceeded

SECRET_BYTES = 32
_PREFIX_BYTES = 16
_RANK_BYTES = 8
# Process, user and group of the other side: struct ucred of Linux.
_CREDENTIALS = struct.Struct("iII")
_RETRY_S = 0.001


# Stores of groups ---------------------------------------------------------------------------------------------------


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


# Sockets of ranks and engines ---------------------------------------------------------------------------------------


def connect_to_engine(name: str, secret: bytes, rank: int, timeout_s: float) -> socket.socket:
    """Return a connection of a rank to a listening process of an engine.

    Args:
        name: name of the engine's socket.
        secret: secret of the run.
        rank: index of the rank.
        timeout_s: deadline of the connection, and of each later wait on the socket, in seconds.

    Raises:
        ConnectionError: the socket does not exist, or belongs to another user.
        DeadlineExceeded: the engine did not accept the connection before the deadline.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection.connect(f"\0{name}")
                break
            except BlockingIOError:
                # The queue of new connections is full for a moment.
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"rank {rank} waited {timeout_s:.0f} s to connect to an engine") from None
                time.sleep(_RETRY_S)
        user = _user_of(connection)
        if user != os.geteuid():
            raise ConnectionError(
                f"the socket {name} of a rollout engine belongs to user {user}, and this run to user {os.geteuid()}: "
                "start engines and training workers as the same user"
            )
        connection.sendall(secret + rank.to_bytes(_RANK_BYTES))
    except BaseException:
        connection.close()
        raise
    return connection


class RankListener:
    """Socket of an engine's process for all ranks of a run.

    Args:
        name: name of the socket.
        secret: secret of the run.
        num_ranks: number of ranks.
    """

    def __init__(self, name: str, secret: bytes, num_ranks: int) -> None:
        self._secret, self._num_ranks = secret, num_ranks
        self._ranks: dict[int, socket.socket] = {}
        self._complete, self._closed = Event(), False
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{name}")
        self._socket.listen()
        self._thread = Thread(target=self._accept_ranks, daemon=True, name="accept-ranks")
        self._thread.start()

    def wait(self, timeout_s: float) -> dict[int, socket.socket]:
        """Return the connection of each rank, when all ranks have connected.

        Raises:
            DeadlineExceeded: a rank did not connect before the deadline.
        """
        if not self._complete.wait(timeout_s):
            raise DeadlineExceeded(
                f"the engine waited {timeout_s:.0f} s for {self._num_ranks} ranks to connect; "
                f"ranks {sorted(self._ranks)} did"
            )
        return dict(sorted(self._ranks.items()))

    def close(self) -> None:
        """Close the socket and the connections of all ranks."""
        self._closed = True
        with suppress(OSError):
            # Ends the thread. After the connection of all ranks, the thread has ended and closed the socket.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for connection in self._ranks.values():
            connection.close()

    def _accept_ranks(self) -> None:
        """Answer connections until all ranks have connected, or `close` shuts the socket down."""
        greeting: set[socket.socket] = set()
        with self._socket, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            try:
                while len(self._ranks) < self._num_ranks:
                    for key, _ in selector.select():
                        ready = key.fileobj
                        assert isinstance(ready, socket.socket)
                        if ready is self._socket:
                            connection, _ = ready.accept()
                            if _user_of(connection) == os.geteuid():
                                greeting.add(connection)
                                selector.register(connection, selectors.EVENT_READ)
                            else:
                                connection.close()
                        else:
                            selector.unregister(ready)
                            greeting.discard(ready)
                            self._greet(ready)
                self._complete.set()
            except OSError:
                if not self._closed:
                    raise
            finally:
                for connection in greeting:
                    connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """Keep the connection of a rank that sent the secret and a new index, or close the connection."""
        try:
            greeting = connection.recv(SECRET_BYTES + _RANK_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            greeting = b""
        secret, rank = greeting[:SECRET_BYTES], int.from_bytes(greeting[SECRET_BYTES:])
        complete = len(greeting) == SECRET_BYTES + _RANK_BYTES
        knows_secret = hmac.compare_digest(secret, self._secret)
        if complete and knows_secret and rank < self._num_ranks and rank not in self._ranks:
            self._ranks[rank] = connection
        else:
            connection.close()


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, from the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)
