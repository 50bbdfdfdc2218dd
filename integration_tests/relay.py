"""A TCP port connected to a server. The relay refuses connections when a test closes it."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Relay:
    """Relay with the same port for its whole life; refuses connections until `open`."""

    def __init__(self) -> None:
        # A bound socket without `listen` keeps the port, and connections are refused.
        self._holder = self._bound(0)
        self.port: int = self._holder.getsockname()[1]
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    def open(self, port: int) -> None:
        """Pass connections on to a port of this machine."""
        self.refuse()
        self._listener = self._bound(self.port)
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener, port), daemon=True).start()

    def refuse(self) -> None:
        """Break all connections, and refuse new connections."""
        with self._lock:
            listener, self._listener = self._listener, None
            broken, self._connections = self._connections, set()
        if listener is not None:
            # Wakes the accepting thread.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in broken:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        """Release the port."""
        self.refuse()
        self._holder.close()

    def _bound(self, port: int) -> socket.socket:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("127.0.0.1", port))
        return bound

    def _accept(self, listener: socket.socket, port: int) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", port))
                except ConnectionRefusedError:
                    client.close()
                    continue
                with self._lock:
                    if self._listener is not listener:
                        client.close()
                        server.close()
                        return
                    self._connections |= {client, server}
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
