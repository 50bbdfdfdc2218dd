"""Weight transport to engines on the trainers' host: every rank writes shards into the parameters of each engine.

An engine keeps the parameters in shared memory (`layout.py`). In an update all ranks copy their shards at once while
the engine waits. Each byte is copied once: there is no gather, no serialisation and no second copy.

Each rank has a Unix socket to each process of an engine, and no other process gets one (`connections.py`). The
first update sends the file descriptor of the memory and the place of each tensor. Every update then exchanges two
bytes: the engine is ready for writes, and the rank has finished writing. The exchange takes about 30 microseconds; a
call of a Ray actor takes milliseconds. The sockets of a process close when the process dies.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor, nn

from rl_plugins.connections import SECRET_BYTES, RankListener, connect_to_engine
from rl_plugins.errors import DeadlineExceeded, EngineLost
from rl_plugins.weights.check import WeightsDiffer, checksum
from rl_plugins.weights.layout import (
    LoadWeights,
    Piece,
    SharedMemory,
    dtype_name,
    dtype_named,
    gaps,
    map_shared,
    place_weights,
    share_parameters,
    views,
)
from rl_plugins.weights.source import WeightMeta, WeightSource

ElementRange = tuple[str, int, int]
"""Elements of a checkpoint tensor: name of the tensor, index of the first element, number of elements."""
_WORD = b"."
_LENGTH_BYTES = 8


class ReceiverLost(ConnectionError):
    """An engine closed the connection during a weight update, or does not answer.

    Attributes:
        position: index of the engine in the sender's list.
        silent: True if the engine does not answer, False if the engine closed the connection.
    """

    def __init__(self, position: int, *, silent: bool, why: str) -> None:
        super().__init__(f"rollout engine {position} was lost in a weight update: {why}")
        self.position, self.silent = position, silent


class WeightUpdateCalls(Protocol):
    """Calls of rank 0 to one engine in updates by shared memory or gloo."""

    def listen(self, init_info: dict[str, Any]) -> None:
        """Call `SharedMemoryReceiver.expect(**init_info)` in every process of the engine, and wait for the end."""

    def begin_update(self, version: int) -> Callable[[], None]:
        """Start one `receive` in every process. Return a function that waits until the new weights are in use."""


class SharedMemorySender:
    """The trainer's side of the transport. Every rank constructs a sender and calls the sender's methods.

    Args:
        source: weights of the policy.
        rank: index of this rank; rank 0 calls the engines.
        world_size: number of ranks.
        broadcast: function to send an object of rank 0 to all ranks.
        engines: all engines on rank 0, empty on other ranks.
        num_engines: number of engines.
        num_receivers: number of processes of each engine.
        keeps_weights: True if the engines keep their weights between updates. Frozen weights are then sent once.
        timeout_s: deadline of every wait for an engine, in seconds.

    Raises:
        EngineLost: an engine was lost during the connection. Every rank raises.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        rank: int,
        world_size: int,
        broadcast: Callable[[Any], Any],
        engines: Sequence[WeightUpdateCalls],
        num_engines: int = 1,
        num_receivers: int = 1,
        keeps_weights: bool = True,
        timeout_s: float = 300.0,
    ) -> None:
        self._source, self._engines, self._num_engines = source, engines, num_engines
        self._keeps_weights = keeps_weights
        # Names of the frozen weights, after the first complete update.
        self._sent_frozen: set[str] = set()
        names = [f"rl_plugins-weights-{uuid.uuid4().hex}" for _ in range(num_engines)]
        names, secret = broadcast((names, secrets.token_hex(SECRET_BYTES)))
        lost = False
        if engines:
            tensors = [(meta.name, dtype_name(meta.dtype), list(meta.shape)) for meta in source.metadata()]
            for name, engine in zip(names, engines, strict=True):
                try:
                    engine.listen(
                        {
                            "name": name,
                            "secret": secret,
                            "num_ranks": world_size,
                            "tensors": tensors,
                            "timeout_s": timeout_s,
                        }
                    )
                except EngineLost:
                    lost = True
        if broadcast(lost):
            raise EngineLost("an engine was lost while ranks connected to it")
        self._connections = [
            (position, _EngineConnection(_address(name, number), secret, rank, timeout_s))
            for position, name in enumerate(names)
            for number in range(num_receivers)
        ]

    def send(self, version: int) -> None:
        """Replace the weights of all engines by the weights of the source. Collective.

        Raises:
            ReceiverLost: an engine did not stop sampling before the deadline, or a process of the engine ended.
        """
        waits = [engine.begin_update(version) for engine in self._engines]
        try:
            for position, connection in self._connections:
                with _receiver_errors(waits, position):
                    connection.wait_until_ready()
            for name, start, part in self._source.shards():
                if name in self._sent_frozen:
                    continue
                for _, connection in self._connections:
                    connection.write(name, start, part)
            for position, connection in self._connections:
                with _receiver_errors(waits, position):
                    connection.end()
            if self._keeps_weights:
                self._sent_frozen = {meta.name for meta in self._source.metadata() if meta.frozen}
        except BaseException:
            # The remaining engines must not wait for this rank.
            self.close()
            raise
        # An engine executes calls one by one: all later calls of any rank come after the update.
        for wait in waits:
            wait()

    def check(self, source: WeightSource, ask: Callable[[int, list[ElementRange]], list[list[int]]]) -> None:
        """Compare the shards of this rank with the same elements in all engines. Collective if `source.shards` is.

        Args:
            source: weights of the last update.
            ask: function that returns `SharedMemoryReceiver.checksums` for each process of an engine, given the index
                of the engine and the ranges of elements.

        Raises:
            WeightsDiffer: a tensor differs. The message names the engine and the first such tensor.
        """
        ranges: list[ElementRange] = []
        expected_checksums: list[list[int]] = []
        for name, start, part in source.shards():
            ranges.append((name, start, part.numel()))
            expected_checksums.append(
                [connection.checksum_of(name, start, part) for _, connection in self._connections]
            )
        found_checksums = [checksums for position in range(self._num_engines) for checksums in ask(position, ranges)]
        by_range = zip(*found_checksums, strict=True)
        for (name, start, count), expected, found in zip(ranges, expected_checksums, by_range, strict=True):
            for (position, _), expected_checksum, checksum_found in zip(
                self._connections, expected, found, strict=True
            ):
                if expected_checksum != checksum_found:
                    raise WeightsDiffer(
                        f"after a weight update {name} of rollout engine {position} differs from the policy's, "
                        f"somewhere in its elements {start} to {start + count - 1}"
                    )

    def close(self) -> None:
        """Close the connections."""
        for _, connection in self._connections:
            connection.close()


@contextmanager
def _receiver_errors(waits: Sequence[Callable[[], None]], position: int) -> Iterator[None]:
    """Convert connection errors to ReceiverLost. On rank 0, raise the engine's own error instead if there is one."""
    try:
        yield
    except ConnectionError as error:
        if waits:
            waits[position]()
        raise ReceiverLost(position, silent=False, why=str(error)) from error
    except DeadlineExceeded as error:
        raise ReceiverLost(position, silent=True, why=str(error)) from error


class _EngineConnection:
    """Connection of one rank to one process of an engine."""

    def __init__(self, name: str, secret: str, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._targets: dict[str, list[tuple[int, Tensor]]] | None = None
        self._socket = connect_to_engine(name, bytes.fromhex(secret), rank, timeout_s)

    def wait_until_ready(self) -> None:
        waits_for = f"rank {self._rank} waited {self._timeout_s:.0f} s for the engine to stop for new weights"
        ended = f"the engine closed its connection to rank {self._rank} before a weight update"
        if self._socket.fileno() < 0:
            raise ConnectionError(f"rank {self._rank} has left the engine in an earlier weight update that failed")
        if self._targets is None:
            self._targets = {}
            for piece, target in _receive_places(self._socket, waits_for, ended):
                self._targets.setdefault(piece.name, []).append((piece.start, target))
        _receive(self._socket, len(_WORD), waits_for, ended)

    def write(self, name: str, start: int, part: Tensor) -> None:
        for target, piece in self._places(name, start, part):
            target.copy_(piece)

    def checksum_of(self, name: str, start: int, part: Tensor) -> int:
        """Return the checksum of a tensor part in the engine's dtype."""
        return checksum(piece.to(target) for target, piece in self._places(name, start, part))

    def _places(self, name: str, start: int, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each destination in the engine with its elements of the part."""
        assert self._targets is not None
        # An empty tensor has no place.
        for begin, target in self._targets[name] if part.numel() else ():
            low, high = max(start, begin), min(start + part.numel(), begin + target.numel())
            if low < high:
                yield target[low - begin : high - begin], part[low - start : high - start]

    def end(self) -> None:
        _send(self._socket, _WORD, f"the engine closed its connection to rank {self._rank} during a weight update")

    def close(self) -> None:
        self._socket.close()
        self._targets = None


class SharedMemoryReceiver:
    """The engine's side of the transport, in one process of an engine.

    Args:
        module: model of the engine. The constructor moves the parameters into shared memory.
        load_weights: weight loader of the model, for staged tensors (see `layout.WeightPlaces`).
        number: index of this process in the engine.
    """

    def __init__(self, module: nn.Module, load_weights: LoadWeights, number: int = 0) -> None:
        self._module, self._load_weights, self._number = module, load_weights, number
        self._memory = share_parameters(module)
        self._staging = SharedMemory(0)
        self._staged: list[tuple[str, Tensor]] = []
        self._direct: list[Piece] = []
        self._staging_pieces: list[Piece] = []
        self._timeout_s = 0.0
        self._listener: RankListener | None = None
        self._ranks: dict[int, socket.socket] = {}

    @property
    def resident_bytes(self) -> int:
        """Resident bytes of the weights."""
        return self._memory.resident_bytes + self._staging.resident_bytes

    def give_back(self) -> int:
        """Free the memory of the weights until the next update; return the number of bytes to be freed.

        Elements outside the checkpoint stay: padding, and parameters without a checkpoint tensor.
        """
        before = self.resident_bytes
        kept = [(start, self._memory.bytes[start:stop].clone()) for start, stop in gaps(self._direct, self._memory)]
        self._memory.give_back()
        self._staging.give_back()
        rest = [(start, part) for start, part in kept if part.any()]
        for start, part in rest:
            self._memory.bytes[start : start + len(part)] = part
        return before - sum(len(part) for _, part in rest)

    def expect(
        self, *, name: str, secret: str, num_ranks: int, tensors: list[tuple[str, str, list[int]]], timeout_s: float
    ) -> None:
        """Disconnect from earlier ranks and listen for new ranks.

        Args:
            name: name by which ranks find the engine.
            secret: secret of the run in hexadecimal digits. A rank proves with the secret that the rank is of this run.
            num_ranks: number of writing ranks.
            tensors: name, dtype and shape of each written tensor.
            timeout_s: deadline of every wait for a rank, in seconds.
        """
        self.disconnect()
        metadata = [WeightMeta(tensor, dtype_named(dtype), tuple(shape)) for tensor, dtype, shape in tensors]
        weight_places = place_weights(self._memory, metadata, self._load_weights)
        self._direct, self._staging_pieces = weight_places.direct, weight_places.staged
        self._staging.close()
        self._staging = SharedMemory(weight_places.staged_bytes)
        shapes = {meta.name: meta.shape for meta in metadata}
        staged = views(self._staging.bytes, weight_places.staged)
        self._staged = [(piece.name, flat.view(shapes[piece.name])) for piece, flat in staged]
        self._timeout_s = timeout_s
        self._listener = RankListener(_address(name, self._number), bytes.fromhex(secret), num_ranks)

    def receive(self) -> None:
        """Let all ranks write, and wait for the end of all writes.

        Raises:
            DeadlineExceeded: a rank did not connect, or did not finish writing, before the deadline.
            ConnectionError: a rank ended.
        """
        try:
            if not self._ranks:
                self._meet_ranks()
            for rank, connection in self._ranks.items():
                _send(connection, _WORD, f"rank {rank} ended before a weight update")
            for rank, connection in self._ranks.items():
                _receive(
                    connection,
                    len(_WORD),
                    f"the engine waited {self._timeout_s:.0f} s for rank {rank} to write its weights",
                    f"rank {rank} ended before it had written its weights",
                )
            if self._staged:
                self._load_weights(self._staged)
        except BaseException:
            # The ranks must not wait for an engine that cannot answer.
            self.disconnect()
            raise

    def checksums(self, ranges: Sequence[ElementRange]) -> list[int]:
        """Return a checksum of each range of elements, as stored in this process.

        Args:
            ranges: ranges of elements of checkpoint tensors.

        Raises:
            WeightsDiffer: a parameter of the model is no longer in the shared memory.
        """
        begin, end = self._memory.bytes.data_ptr(), self._memory.bytes.data_ptr() + self._memory.size
        for name, parameter in self._module.named_parameters():
            if parameter.numel() and not begin <= parameter.data_ptr() < end:
                raise WeightsDiffer(f"{name} of the rollout engine is not in the memory that weight updates write to")
        places: dict[str, list[tuple[int, Tensor]]] = {}
        for memory, pieces in ((self._memory, self._direct), (self._staging, self._staging_pieces)):
            for piece, flat in views(memory.bytes, pieces):
                places.setdefault(piece.name, []).append((piece.start, flat))
        return [
            checksum(
                flat[max(start - begin, 0) : max(start + count - begin, 0)]
                # An empty tensor has no place.
                for begin, flat in (places[name] if count else ())
            )
            for name, start, count in ranges
        ]

    def _meet_ranks(self) -> None:
        """Wait for the connections of all ranks, and send the places of all tensors."""
        if self._listener is None:
            raise ConnectionError("the engine has lost its connection to the ranks in an earlier weight update")
        self._ranks = self._listener.wait(self._timeout_s)
        places = {
            "sizes": [self._memory.size, self._staging.size],
            "direct": [asdict(piece) for piece in self._direct],
            "staged": [asdict(piece) for piece in self._staging_pieces],
        }
        message = json.dumps(places).encode()
        length = len(message).to_bytes(_LENGTH_BYTES)
        for rank, connection in self._ranks.items():
            connection.settimeout(self._timeout_s)
            ended = f"rank {rank} ended before its first weight update"
            _send(connection, length, ended, [self._memory.fd, self._staging.fd])
            _send(connection, message, ended)

    def disconnect(self) -> None:
        """Close all connections. The parameters stay in shared memory."""
        if self._listener is not None:
            self._listener.close()
        self._ranks, self._listener = {}, None


def _receive_places(connection: socket.socket, waits_for: str, ended: str) -> list[tuple[Piece, Tensor]]:
    """Return the flat tensors to write to, in the parameters' memory and in the staging memory."""
    try:
        length, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 2)
    except TimeoutError:
        raise DeadlineExceeded(waits_for) from None
    if len(length) < _LENGTH_BYTES:
        raise ConnectionError(ended)
    places = json.loads(_receive(connection, int.from_bytes(length), waits_for, ended))
    targets: list[tuple[Piece, Tensor]] = []
    for fd, size, kind in zip(descriptors, places["sizes"], ("direct", "staged"), strict=True):
        targets += views(map_shared(fd, size), [Piece(**piece) for piece in places[kind]])
        os.close(fd)
    return targets


def _send(connection: socket.socket, data: bytes, ended: str, descriptors: Sequence[int] = ()) -> None:
    try:
        if descriptors:
            socket.send_fds(connection, [data], list(descriptors))
        else:
            connection.sendall(data)
    except ConnectionError:
        raise ConnectionError(ended) from None


def _receive(connection: socket.socket, size: int, waits_for: str, ended: str) -> bytes:
    received = b""
    while len(received) < size:
        try:
            more = connection.recv(size - len(received))
        except TimeoutError:
            raise DeadlineExceeded(waits_for) from None
        except ConnectionError:
            raise ConnectionError(ended) from None
        if not more:
            raise ConnectionError(ended)
        received += more
    return received


def _address(name: str, number: int) -> str:
    return f"{name}-{number}"
