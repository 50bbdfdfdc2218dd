"""Messages sent by a thread: the sender never waits for a slow or hanging receiver."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from multiprocessing.connection import Connection


class Outbox:
    """Sends messages in their order.

    Args:
        connection: connection to the receiver. After its end, all further messages are dropped.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: bytes) -> None:
        """Send a message after all earlier messages, without waiting."""
        self._messages.put(message)

    def close(self) -> None:
        """End the thread after the messages so far. The receiver must read them, or must have ended."""
        self._messages.put(None)
        self._thread.join()

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self._connection.send_bytes(message)
