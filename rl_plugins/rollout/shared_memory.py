"""Weights from trainers to an engine on the same host through one bucket of shared memory.

The bucket has two halves. While the engine loads one half, every rank writes its own shards of the next layers into
the other, so nothing is gathered, nothing is serialised, and the extra memory is the bucket. The files are unlinked as
soon as both sides have them open: a killed process leaves nothing behind.

Each rank has a Unix socket to the engine. One byte says that its part of a half is written, one byte back that the
half may be written again. That takes some 30 microseconds, where the call of a Ray actor takes milliseconds, and a
process that dies closes its sockets.
"""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_plugins.errors import DeadlineExceeded
from rl_plugins.rollout.weights import WeightMeta, WeightSource

SHARED_MEMORY = "/dev/shm"
DEFAULT_BUCKET_BYTES = 64 * 2**20
_ALIGNMENT = 64
_WORD = b"."

TensorPlace = tuple[str, str, list[int], int]
"""Name, dtype, shape, and offset in bytes of a tensor in its half."""


class Engine(Protocol):
    """What rank 0 asks of the engine."""

    def init(self, init_info: dict[str, Any]) -> None:
        """Make a `SharedMemoryReceiver(**init_info)` in every process of the engine, and wait for them."""

    def load(self, version: int) -> Callable[[], None]:
        """Let them `receive` once; returns at once, and what it returns waits until the new weights are in use."""


@dataclass(frozen=True)
class _Bucket:
    tensors: dict[str, tuple[WeightMeta, int]]

    def describe(self) -> list[TensorPlace]:
        return [
            (meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape), offset)
            for meta, offset in self.tensors.values()
        ]


def plan_buckets(metadata: list[WeightMeta], half_bytes: int) -> list[_Bucket]:
    """Pack parameters in order into as few halves as hold them, each tensor whole and aligned."""
    buckets: list[dict[str, tuple[WeightMeta, int]]] = [{}]
    used = 0
    for meta in metadata:
        size = -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT
        if buckets[-1] and used + size > half_bytes:
            buckets.append({})
            used = 0
        buckets[-1][meta.name] = (meta, used)
        used += size
    return [_Bucket(tensors) for tensors in buckets]


class SharedMemorySender:
    """The trainer's side; built and called on every rank.

    Args:
        source: the weights.
        rank: this rank; rank 0 talks to the engine.
        world_size: number of ranks.
        barrier: waits for all ranks.
        broadcast: sends rank 0's object to all ranks.
        engine: the engine (rank 0), None elsewhere.
        num_receivers: processes of the engine.
        bucket_bytes: memory for both halves; grows if one tensor needs more.
        timeout_s: deadline of every wait for the other side.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        rank: int,
        world_size: int,
        barrier: Callable[[], None],
        broadcast: Callable[[Any], Any],
        engine: Engine | None,
        num_receivers: int = 1,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = 300.0,
    ) -> None:
        self._source, self._rank, self._barrier, self._engine = source, rank, barrier, engine
        self._timeout_s = timeout_s
        metadata = source.metadata()
        total = sum(-(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT for meta in metadata)
        largest = max(meta.nbytes for meta in metadata) + _ALIGNMENT
        half_bytes = max(min(bucket_bytes // 2, total), largest)
        self._buckets = plan_buckets(metadata, half_bytes)
        self.bucket_bytes = 2 * half_bytes
        with ExitStack() as unlinking:
            created = [_create_file(half_bytes, unlinking) for _ in range(2)] if rank == 0 else []
            paths, name = broadcast((created, f"rl_plugins-weights-{uuid.uuid4().hex}"))
            self._halves = _open_halves(paths, half_bytes)
            if engine is not None:
                engine.init({
                    "paths": paths, "half_bytes": half_bytes, "name": name, "num_ranks": world_size,
                    "buckets": [bucket.describe() for bucket in self._buckets], "timeout_s": timeout_s,
                })  # fmt: skip
            barrier()
        self._sockets = [self._connect(_address(name, receiver)) for receiver in range(num_receivers)]

    def send(self, version: int) -> None:
        """Update the engine's weights to those of the source. Collective.

        Raises:
            DeadlineExceeded: the engine did not take a half in time.
            ConnectionError: the engine's process ended, or closed the connection because it failed.
        """
        loaded = None if self._engine is None else self._engine.load(version)
        try:
            self._write()
        except ConnectionError:
            # The engine's own error, if it lives to tell it, says more.
            if loaded is not None:
                loaded()
            raise
        if loaded is not None:
            loaded()
        # No rank goes on to sample before the new weights are in use.
        self._barrier()

    def _write(self) -> None:
        shards = self._source.shards()
        for index, bucket in enumerate(self._buckets):
            if index >= 2:
                self._wait_for_engine(index - 2)
            half = self._halves[index % 2]
            for _ in bucket.tensors:
                name, start, part = next(shards)
                meta, offset = bucket.tensors[name]
                _view(half, meta, offset)[start : start + part.numel()].copy_(part)
            for connection in self._sockets:
                connection.sendall(_WORD)
        for index in range(max(0, len(self._buckets) - 2), len(self._buckets)):
            self._wait_for_engine(index)

    def _wait_for_engine(self, index: int) -> None:
        names = list(self._buckets[index].tensors)
        for connection in self._sockets:
            _receive_word(
                connection,
                f"rank {self._rank} waited {self._timeout_s:.0f} s for the engine to load {names[0]} ... {names[-1]}",
                f"the engine closed its connection to rank {self._rank} before it had loaded {names[0]}",
            )

    def _connect(self, address: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(self._timeout_s)
        connection.connect(address)
        return connection


class SharedMemoryReceiver:
    """The engine's side, in each of its processes.

    Args:
        paths: files of the two halves.
        half_bytes: size of each.
        name: of this transfer; the ranks find the receiver's socket by it.
        num_ranks: how many ranks write.
        buckets: which tensors come together, in order.
        timeout_s: deadline of every wait for a rank.
        receiver: number of this process among those of the engine.
    """

    def __init__(
        self,
        *,
        paths: list[str],
        half_bytes: int,
        name: str,
        num_ranks: int,
        buckets: list[list[TensorPlace]],
        timeout_s: float,
        receiver: int = 0,
    ) -> None:
        halves = _open_halves(paths, half_bytes)
        self._weights = [_read_tensors(halves[index % 2], bucket) for index, bucket in enumerate(buckets)]
        self._num_ranks, self._timeout_s = num_ranks, timeout_s
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(timeout_s)
        self._listener.bind(_address(name, receiver))
        self._listener.listen(num_ranks)

    def receive(self, load: Callable[[list[tuple[str, Tensor]]], Any]) -> None:
        """Give `load` the named tensors of each half, views that are valid until it returns.

        Raises:
            DeadlineExceeded: a rank did not write its part in time.
            ConnectionError: a rank ended.
        """
        try:
            while len(self._connections) < self._num_ranks:
                connection, _ = self._listener.accept()
                connection.settimeout(self._timeout_s)
                self._connections.append(connection)
            for weights in self._weights:
                first = weights[0][0]
                for connection in self._connections:
                    _receive_word(
                        connection,
                        f"the engine waited {self._timeout_s:.0f} s for a rank to write {first} ...",
                        f"a rank ended before it had written {first}",
                    )
                load(weights)
                for connection in self._connections:
                    connection.sendall(_WORD)
        except BaseException:
            # The ranks must not wait for an engine that will not answer.
            self.close()
            raise

    def close(self) -> None:
        """Close the connections and forget the bucket."""
        for connection in (*self._connections, self._listener):
            connection.close()
        self._connections, self._weights = [], []


def _address(name: str, receiver: int) -> str:
    # An abstract address of Linux: no file that a killed process could leave behind.
    return f"\0{name}-{receiver}"


def _receive_word(connection: socket.socket, too_late: str, ended: str) -> None:
    try:
        word = connection.recv(1)
    except TimeoutError:
        raise DeadlineExceeded(too_late) from None
    if not word:
        raise ConnectionError(ended)


def _view(half: Tensor, meta: WeightMeta, offset: int) -> Tensor:
    return half[offset : offset + meta.nbytes].view(meta.dtype)


def _create_file(size: int, unlinking: ExitStack) -> str:
    descriptor, path = tempfile.mkstemp(prefix="rl_plugins-weights-", dir=SHARED_MEMORY)
    unlinking.callback(os.unlink, path)
    try:
        os.posix_fallocate(descriptor, 0, size)  # Fails here, not with SIGBUS on first touch, when /dev/shm is full.
    except OSError as error:
        raise OSError(
            error.errno,
            f"{SHARED_MEMORY} has no room for a weight bucket of {2 * size / 2**20:.0f} MB: "
            "lower weight_transfer.bucket_mb or enlarge it (docker run --shm-size)",
        ) from error
    finally:
        os.close(descriptor)
    return path


def _open_halves(paths: list[str], half_bytes: int) -> list[Tensor]:
    return [torch.from_file(path, shared=True, size=half_bytes, dtype=torch.uint8) for path in paths]


def _read_tensors(half: Tensor, tensors: list[TensorPlace]) -> list[tuple[str, Tensor]]:
    weights = []
    for name, dtype_name, shape, offset in tensors:
        meta = WeightMeta(name, getattr(torch, dtype_name), tuple(shape))
        weights.append((name, _view(half, meta, offset).view(meta.shape)))
    return weights
