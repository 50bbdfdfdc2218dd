"""Weights from trainers to the engines on their host: every rank writes its shards into each engine's parameters.

An engine keeps its parameters in shared memory (`shared_parameters.py`), so an update is one copy of each byte, made
by all ranks at once while the engine waits: nothing is gathered, nothing serialised, and there is no second copy.

Each rank has a Unix socket to the engine. Over it come, once, the memory's descriptor and the place of each tensor;
then, in every update, one byte from the engine that it waits and one byte back that the rank has written. That takes
some 30 microseconds, where the call of a Ray actor takes milliseconds, and a process that dies closes its sockets.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor, nn

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

Run = tuple[str, int, int]
"""Name of a tensor of the checkpoint, its first element that is meant, and how many are."""
_WORD = b"."
_LENGTH_BYTES = 8


class ReceiverLost(ConnectionError):
    """An engine that weights were to be sent to has closed the connection, or does not answer.

    Attributes:
        position: of the engine among those of the sender.
        silent: it does not answer.
    """

    def __init__(self, position: int, *, silent: bool, why: str) -> None:
        super().__init__(f"rollout engine {position} was lost in a weight update: {why}")
        self.position, self.silent = position, silent


class Engine(Protocol):
    """What rank 0 asks of an engine."""

    def init(self, init_info: dict[str, Any]) -> None:
        """Call `SharedMemoryReceiver.expect(**init_info)` in every process of the engine, and wait for it."""

    def load(self, version: int) -> Callable[[], None]:
        """Let them `receive` once; returns at once, and what it returns waits until the new weights are in use."""


class SharedMemorySender:
    """The trainer's side; built and called on every rank.

    Args:
        source: the weights.
        rank: this rank; rank 0 talks to the engine.
        world_size: number of ranks.
        broadcast: sends rank 0's object to all ranks.
        engines: all engines (rank 0), nothing elsewhere.
        num_engines: how many there are.
        num_receivers: processes of each engine.
        keeps_weights: the engines have between updates what they were sent, so that what never changes is sent once.
        timeout_s: deadline of every wait for the other side.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        rank: int,
        world_size: int,
        broadcast: Callable[[Any], Any],
        engines: Sequence[Engine],
        num_engines: int = 1,
        num_receivers: int = 1,
        keeps_weights: bool = True,
        timeout_s: float = 300.0,
    ) -> None:
        self._source, self._engines, self._num_engines = source, engines, num_engines
        self._keeps_weights = keeps_weights
        # What never changes; known when the first update is through.
        self._sent_for_good: set[str] = set()
        names = broadcast([f"rl_plugins-weights-{uuid.uuid4().hex}" for _ in range(num_engines)])
        lost = False
        if engines:
            tensors = [(meta.name, dtype_name(meta.dtype), list(meta.shape)) for meta in source.metadata()]
            for name, engine in zip(names, engines, strict=True):
                try:
                    engine.init({"name": name, "num_ranks": world_size, "tensors": tensors, "timeout_s": timeout_s})
                except EngineLost:
                    lost = True
        if broadcast(lost):
            raise EngineLost("an engine was lost while ranks connected to it")
        self._receivers = [
            (position, _EngineConnection(name, number, rank, timeout_s))
            for position, name in enumerate(names)
            for number in range(num_receivers)
        ]

    def send(self, version: int) -> None:
        """Update the engines' weights to those of the source. Collective.

        Raises:
            ReceiverLost: an engine did not stop for the update in time, or its process ended or has failed.
        """
        loaded = [engine.load(version) for engine in self._engines]
        try:
            for position, receiver in self._receivers:
                with _own_error(loaded, position):
                    receiver.wait_until_ready()
            for name, start, part in self._source.shards():
                if name in self._sent_for_good:
                    continue
                for _, receiver in self._receivers:
                    receiver.write(name, start, part)
            for position, receiver in self._receivers:
                with _own_error(loaded, position):
                    receiver.end()
            if self._keeps_weights:
                self._sent_for_good = {meta.name for meta in self._source.metadata() if meta.frozen}
        except BaseException:
            # The other engines must not wait for this rank.
            self.close()
            raise
        # An engine does one thing at a time: what any rank asks of it from now on comes after the update.
        for wait in loaded:
            wait()

    def check(self, source: WeightSource, ask: Callable[[int, list[Run]], list[list[int]]]) -> None:
        """Compare this rank's shards with what the engines have in their place. Not collective.

        Args:
            source: the weights as they were sent.
            ask: gives the `SharedMemoryReceiver.checksums` of each process of the engine of a number.

        Raises:
            WeightsDiffer: names the engine and the first tensor that differs.
        """
        runs: list[Run] = []
        mine: list[list[int]] = []
        for name, start, part in source.shards():
            runs.append((name, start, part.numel()))
            mine.append([receiver.checksum_of(name, start, part) for _, receiver in self._receivers])
        theirs = [checksums for position in range(self._num_engines) for checksums in ask(position, runs)]
        for (name, start, count), expected, found in zip(runs, mine, zip(*theirs, strict=True), strict=True):
            for (position, _), one, other in zip(self._receivers, expected, found, strict=True):
                if one != other:
                    raise WeightsDiffer(
                        f"after a weight update {name} of rollout engine {position} differs from the policy's, "
                        f"somewhere in its elements {start} to {start + count - 1}"
                    )

    def close(self) -> None:
        """Close the connections."""
        for _, receiver in self._receivers:
            receiver.close()


@contextmanager
def _own_error(loaded: Sequence[Callable[[], None]], position: int) -> Iterator[None]:
    """What the engine itself has to say of a connection that it closed, if it lives to tell it (rank 0 hears it)."""
    try:
        yield
    except ConnectionError as error:
        if loaded:
            loaded[position]()
        raise ReceiverLost(position, silent=False, why=str(error)) from error
    except DeadlineExceeded as error:
        raise ReceiverLost(position, silent=True, why=str(error)) from error


class _EngineConnection:
    """One rank's connection to one process of the engine."""

    def __init__(self, name: str, number: int, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._targets: dict[str, list[tuple[int, Tensor]]] | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        self._socket.connect(_address(name, number))
        self._socket.sendall(rank.to_bytes(_LENGTH_BYTES))

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
        """Of a part of a tensor, if it is in the engine as it was written."""
        return checksum(piece.to(target) for target, piece in self._places(name, start, part))

    def _places(self, name: str, start: int, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Where the part goes, and what of it goes there."""
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
    """The engine's side, in each of its processes.

    Args:
        module: the model; its parameters move into shared memory.
        load_weights: the model's own loader, for what cannot be written into the parameters as it is.
        number: of this process among those of the engine.
    """

    def __init__(self, module: nn.Module, load_weights: LoadWeights, number: int = 0) -> None:
        self._module, self._load_weights, self._number = module, load_weights, number
        self._memory = share_parameters(module)
        self._staging = SharedMemory(0)
        self._staged: list[tuple[str, Tensor]] = []
        self._direct: list[Piece] = []
        self._staging_pieces: list[Piece] = []
        self._num_ranks, self._timeout_s = 0, 0.0
        self._listener: socket.socket | None = None
        self._ranks: dict[int, socket.socket] = {}

    @property
    def held(self) -> int:
        """Bytes that the weights take."""
        return self._memory.held + self._staging.held

    def give_back(self) -> int:
        """Free what the ranks write, until they write it again; returns how many bytes that must free.

        What no rank writes stays: padding, and parameters that the checkpoint does not have.
        """
        held = self.held
        kept = [(start, self._memory.bytes[start:stop].clone()) for start, stop in gaps(self._direct, self._memory)]
        self._memory.give_back()
        self._staging.give_back()
        rest = [(start, part) for start, part in kept if part.any()]
        for start, part in rest:
            self._memory.bytes[start : start + len(part)] = part
        return held - sum(len(part) for _, part in rest)

    def expect(self, *, name: str, num_ranks: int, tensors: list[tuple[str, str, list[int]]], timeout_s: float) -> None:
        """Listen for a new set of ranks; those of before are gone.

        Args:
            name: the ranks find this process by it.
            num_ranks: how many ranks write.
            tensors: name, dtype and shape of what they will write.
            timeout_s: deadline of every wait for a rank.
        """
        self.disconnect()
        metadata = [WeightMeta(tensor, dtype_named(dtype), tuple(shape)) for tensor, dtype, shape in tensors]
        placement = place_weights(self._memory, metadata, self._load_weights)
        self._direct, self._staging_pieces = placement.direct, placement.staged
        self._staging.close()
        self._staging = SharedMemory(placement.staged_bytes)
        shapes = {meta.name: meta.shape for meta in metadata}
        staged = views(self._staging.bytes, placement.staged)
        self._staged = [(piece.name, flat.view(shapes[piece.name])) for piece, flat in staged]
        self._num_ranks, self._timeout_s = num_ranks, timeout_s
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(timeout_s)
        self._listener.bind(_address(name, self._number))
        self._listener.listen(num_ranks)

    def receive(self) -> None:
        """Let the ranks write, and wait until all of them have.

        Raises:
            DeadlineExceeded: a rank did not come, or did not write in time.
            ConnectionError: a rank ended.
        """
        try:
            while len(self._ranks) < self._num_ranks:
                self._accept()
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
            # The ranks must not wait for an engine that will not answer.
            self.disconnect()
            raise

    def checksums(self, runs: Sequence[Run]) -> list[int]:
        """Of what is in this process's memory in the place of runs of elements of the checkpoint's tensors.

        Raises:
            WeightsDiffer: a parameter of the model has left the memory that the ranks write to.
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
            for name, start, count in runs
        ]

    def _accept(self) -> None:
        if self._listener is None:
            raise ConnectionError("the engine has lost its connection to the ranks in an earlier weight update")
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine waited {self._timeout_s:.0f} s for {self._num_ranks} ranks to connect; "
                f"ranks {sorted(self._ranks)} did"
            ) from None
        connection.settimeout(self._timeout_s)
        waits_for = f"the engine waited {self._timeout_s:.0f} s for a rank to say which it is"
        rank = int.from_bytes(_receive(connection, _LENGTH_BYTES, waits_for, "a rank ended while it connected"))
        self._ranks[rank] = connection
        places = {
            "sizes": [self._memory.size, self._staging.size],
            "direct": [asdict(piece) for piece in self._direct],
            "staged": [asdict(piece) for piece in self._staging_pieces],
        }
        message = json.dumps(places).encode()
        length = len(message).to_bytes(_LENGTH_BYTES)
        descriptors = [self._memory.fd, self._staging.fd]
        _send(connection, length, f"rank {rank} ended before its first weight update", descriptors)
        _send(connection, message, f"rank {rank} ended before its first weight update")

    def disconnect(self) -> None:
        """Close the connections; the parameters stay where they are."""
        for connection in (*self._ranks.values(), *([self._listener] if self._listener else [])):
            connection.close()
        self._ranks, self._listener = {}, None


def _receive_places(connection: socket.socket, waits_for: str, ended: str) -> list[tuple[Piece, Tensor]]:
    """The flat tensors to write to, of the parameters' memory and the staged one."""
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
    # An abstract address of Linux: no file that a killed process could leave behind.
    return f"\0{name}-{number}"
