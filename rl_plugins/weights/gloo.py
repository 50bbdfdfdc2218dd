"""Weights from trainers to engines on other machines, without GPUs: broadcast in buckets over a gloo group of its own.

All ranks walk the source, which is a collective; rank 0 packs what comes into buckets and broadcasts them to every
process of every engine, which load a bucket while the next one is on its way. Both sides cut the same buckets, from
what is known of the tensors beforehand.

Gloo passes a bucket on from one process to the next, and does not tell a process that has half a bucket when the rest
will not come. So nobody leaves an update that can go on: an engine that cannot load a bucket takes the others all the
same, and says why when the update is through.

When a process ends or stops, the group is of no use any more: rank 0 leaves it, which the others notice, with half a
bucket by their deadline, and asks which engines still answer. The next update makes a new group, of those that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rl_plugins.errors import DeadlineExceeded, EngineLost
from rl_plugins.weights.layout import LoadWeights, dtype_name, dtype_named
from rl_plugins.weights.shared_memory import Engine
from rl_plugins.weights.source import WeightMeta, WeightSource

_ALIGNMENT = 16
# One is loaded or packed while the other is on its way.
_BUFFERS = 2


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together.

    Attributes:
        starts: where each begins.
        tensors: what they are.
        nbytes: of all of them.
    """

    starts: tuple[int, ...]
    tensors: tuple[WeightMeta, ...]
    nbytes: int

    def views(self, buffer: Tensor) -> Iterator[tuple[WeightMeta, Tensor]]:
        """Each tensor in a buffer."""
        for start, meta in zip(self.starts, self.tensors, strict=True):
            yield meta, buffer[start : start + meta.nbytes].view(meta.dtype).view(meta.shape)


def buckets(metadata: Sequence[WeightMeta], limit: int) -> list[Bucket]:
    """Tensors in their order, in buckets of at most so many bytes; a larger tensor is alone in its own."""
    result: list[Bucket] = []
    starts: list[int] = []
    tensors: list[WeightMeta] = []
    end = 0
    for meta in metadata:
        if tensors and end + meta.nbytes > limit:
            result.append(Bucket(tuple(starts), tuple(tensors), end))
            starts, tensors, end = [], [], 0
        starts.append(end)
        tensors.append(meta)
        end += -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT
    return [*result, Bucket(tuple(starts), tuple(tensors), end)] if tensors else result


class GlooSender:
    """The trainer's side; built and called on every rank.

    Args:
        source: the weights.
        rank: this rank; rank 0 talks to the engines.
        share: gives rank 0's object to all ranks, and waits for all of them.
        engines: all engines (rank 0), nothing elsewhere.
        num_receivers: processes of each engine.
        find_lost: raises `EngineLost` if one of the engines does not answer (rank 0).
        bucket_bytes: bytes that are sent at once.
        timeout_s: deadline of every wait for the other side.
        host: address of rank 0's machine; that which Ray knows by default.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        rank: int,
        share: Callable[[Any], Any],
        engines: Sequence[Engine],
        find_lost: Callable[[], None],
        num_receivers: int = 1,
        bucket_bytes: int = 64 * 2**20,
        timeout_s: float = 300.0,
        host: str | None = None,
    ) -> None:
        self._source, self._rank, self._share, self._engines = source, rank, share, engines
        self._find_lost, self._timeout_s = find_lost, timeout_s
        self._group: _Group | None = None
        self._buckets = buckets(source.metadata(), bucket_bytes) if engines else []
        # Kept: memory that is written for the first time is several times slower.
        self._buffers = _buffers(self._buckets)
        if engines:
            self._world_size = 1 + len(engines) * num_receivers
            self._store = _store(host or _own_address(), 0, self._world_size, timeout_s, is_master=True)
        self._together(lambda: self._open(num_receivers, bucket_bytes))

    def _open(self, num_receivers: int, bucket_bytes: int) -> None:
        tensors = [(meta.name, dtype_name(meta.dtype), list(meta.shape)) for meta in self._source.metadata()]
        for number, engine in enumerate(self._engines):
            engine.init(
                {
                    "host": self._store.host,
                    "port": self._store.port,
                    "first_rank": 1 + number * num_receivers,
                    "world_size": self._world_size,
                    "tensors": tensors,
                    "bucket_bytes": bucket_bytes,
                    "timeout_s": self._timeout_s,
                }
            )

    def send(self, version: int) -> None:
        """Update the engines' weights to those of the source. Collective.

        Raises:
            EngineLost: an engine has ended or does not answer; on every rank.
            DeadlineExceeded: an engine that answers did not take a bucket in time.
            ConnectionError: a connection to an engine that answers broke, or, on other ranks, whatever else rank 0
                raises.
        """
        self._together(lambda: self._send(version))

    def _together(self, work: Callable[[], None]) -> None:
        """Rank 0's part of the work; no rank goes on before it is done, and all hear how it ended."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        lost, failed = self._share((isinstance(failure, EngineLost), failure is not None))
        if failure is not None:
            raise failure
        if lost:
            raise EngineLost("rank 0 has lost an engine in a weight update")
        if failed:
            raise ConnectionError("rank 0 could not send the weights to all rollout engines")

    def close(self) -> None:
        """Leave the engines; the next update comes from another sender."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _send(self, version: int) -> None:
        loaded = [engine.load(version) for engine in self._engines]
        walk = iter(self._source)
        try:
            try:
                if loaded:
                    self._broadcast(walk)
            finally:
                # The walk is a collective, whatever became of the engines.
                for _ in walk:
                    pass
            for wait in loaded:
                wait()
        except (ConnectionError, DeadlineExceeded):
            # No engine must wait for what does not come any more.
            self.close()
            self._find_lost()
            _raise_cause(loaded)
            raise

    def _broadcast(self, walk: Iterator[tuple[str, Tensor]]) -> None:
        waits_for = f"rank {self._rank} waited {self._timeout_s:.0f} s for the rollout engines to"
        if self._group is None:
            with _deadline(f"{waits_for} connect for new weights"):
                self._group = _Group(self._store, 0, self._world_size, self._timeout_s)
        group, buffers = self._group, self._buffers
        for number, bucket in enumerate(self._buckets):
            slot = number % _BUFFERS
            with _deadline(f"{waits_for} take part {number - _BUFFERS + 1} of {len(self._buckets)} of the weights"):
                group.finish(slot)
            for meta, place in bucket.views(buffers[slot]):
                name, tensor = next(walk)
                assert name == meta.name, f"the source gave {name} where its metadata has {meta.name}"
                place.copy_(tensor)
            group.broadcast(slot, buffers[slot][: bucket.nbytes])
        for slot in range(len(buffers)):
            with _deadline(f"{waits_for} take the last of {len(self._buckets)} parts of the weights"):
                group.finish(slot)


class GlooReceiver:
    """The engine's side, in each of its processes.

    Args:
        load_weights: the model's own loader.
        number: of this process among those of the engine.
    """

    def __init__(self, load_weights: LoadWeights, number: int = 0) -> None:
        self._load_weights, self._number = load_weights, number
        self._connect: Callable[[], _Group] | None = None
        self._group: _Group | None = None
        self._buckets: list[Bucket] = []
        self._buffers: list[Tensor] = []
        self._timeout_s = 0.0

    def expect(
        self,
        *,
        host: str,
        port: int,
        first_rank: int,
        world_size: int,
        tensors: list[tuple[str, str, list[int]]],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        """Know where a new sender is; the one of before is gone.

        Args:
            host: address of its machine.
            port: of its store.
            first_rank: in the group, of the first process of this engine.
            world_size: of the group.
            tensors: name, dtype and shape of what it will send.
            bucket_bytes: bytes that it sends at once.
            timeout_s: deadline of every wait for it.
        """
        self.disconnect()
        metadata = [WeightMeta(name, dtype_named(dtype), tuple(shape)) for name, dtype, shape in tensors]
        self._buckets, self._timeout_s = buckets(metadata, bucket_bytes), timeout_s
        self._buffers = _buffers(self._buckets)

        def connect() -> _Group:
            store = _store(host, port, world_size, timeout_s, is_master=False)
            return _Group(store, first_rank + self._number, world_size, timeout_s)

        self._connect = connect

    def receive(self) -> None:
        """Take in all weights once; if the model cannot load a bucket, the rest is taken in and not loaded.

        Raises:
            DeadlineExceeded: they did not come in time.
            ConnectionError: the sender ended.
            Exception: the first that the model's loader raised, when all weights have come.
        """
        failure: Exception | None = None
        try:
            for bucket, buffer in self._received():
                try:
                    if failure is None:
                        self._load_weights((meta.name, tensor) for meta, tensor in bucket.views(buffer))
                except Exception as error:
                    failure = error
        except BaseException:
            # Rank 0 must not wait for an engine that takes nothing more.
            self.disconnect()
            raise
        if failure is not None:
            raise failure

    def _received(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket and the buffer that it is in, until the next one is asked for."""
        assert self._connect is not None, "expect comes first"
        waits_for = f"the engine waited {self._timeout_s:.0f} s for rank 0 to"
        if self._group is None:
            with _deadline(f"{waits_for} connect for new weights"):
                self._group = self._connect()
        group, buffers = self._group, self._buffers
        for slot, (buffer, bucket) in enumerate(zip(buffers, self._buckets, strict=False)):
            group.broadcast(slot, buffer[: bucket.nbytes])
        for number, bucket in enumerate(self._buckets):
            slot = number % _BUFFERS
            with _deadline(f"{waits_for} send part {number + 1} of {len(self._buckets)} of the weights"):
                group.finish(slot)
            yield bucket, buffers[slot]
            if number + _BUFFERS < len(self._buckets):
                following = self._buckets[number + _BUFFERS]
                group.broadcast(slot, buffers[slot][: following.nbytes])

    def disconnect(self) -> None:
        """Leave the sender."""
        if self._group is not None:
            self._group.close()
        self._group = None


class _Group:
    """Rank 0 and all processes of all engines, connected, and what is on its way between them.

    Gloo closes its connections with the last reference to the group or to what is on its way in it, not on demand. So
    nothing else may hold one, least of all an error's traceback.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        # Beside the process group of the trainers, of which a process has one.
        prefixed = torch.distributed.PrefixStore("weights", store)
        self._gloo: Any = torch.distributed.ProcessGroupGloo(prefixed, rank, world_size, timedelta(seconds=timeout_s))
        self._under_way: dict[int, Any] = {}

    def broadcast(self, slot: int, flat: Tensor) -> None:
        """From rank 0 to all others; returns at once."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._under_way[slot] = self._gloo.broadcast([flat], options)

    def finish(self, slot: int) -> None:
        """Wait for the last one of a slot, if there is one."""
        if slot in self._under_way:
            self._under_way[slot].wait()

    def close(self) -> None:
        """Close all connections: processes that wait for this one hear of it, but for those that have half a bucket."""
        self._under_way.clear()
        self._gloo = None


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _store(host: str, port: int, world_size: int, timeout_s: float, *, is_master: bool) -> Any:
    return torch.distributed.TCPStore(
        host, port, world_size, is_master, timedelta(seconds=timeout_s), wait_for_workers=False
    )


def _buffers(parts: Sequence[Bucket]) -> list[Tensor]:
    size = max((bucket.nbytes for bucket in parts), default=0)
    return [torch.empty(size, dtype=torch.uint8) for _ in range(min(_BUFFERS, len(parts)))]


@contextmanager
def _deadline(waits_for: str) -> Iterator[None]:
    """Gloo has one error for all that can go wrong, and the words tell what it was."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if "imed out" in reason or "imeout" in reason:
            raise DeadlineExceeded(waits_for) from None
        raise ConnectionError(f"{waits_for}, and lost a connection: {reason}") from None


def _raise_cause(loaded: Sequence[Callable[[], None]]) -> None:
    """What an engine itself has to say of a broken connection, if it is more than that it broke."""
    for wait in loaded:
        try:
            wait()
        except (ConnectionError, DeadlineExceeded):
            continue
