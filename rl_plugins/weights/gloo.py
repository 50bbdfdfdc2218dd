"""Weight transport to engines on other machines without GPUs: broadcasts of buckets over a separate gloo group.

All ranks iterate over the source, because the iteration is collective. Rank 0 packs the tensors into buckets and
broadcasts the buckets to every process of every engine. An engine loads a bucket while the next bucket is in transit.
Both sides compute the same buckets from the descriptions of the tensors.

Gloo forwards a bucket from process to process. A process with half a bucket gets no notice if the rest will not come.
Therefore no process leaves an update that can continue: an engine that cannot load a bucket still receives all later
buckets, and raises its error at the end of the update.

The group is unusable after a process ended or stopped. Rank 0 then leaves the group. The remaining processes notice the
closed connection, or reach their deadline if half a bucket is missing. Rank 0 finds the living engines, and
the next update connects a new group of the living engines.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rl_plugins.addresses import own_address
from rl_plugins.connections import ListeningStore, StoreAddress, join_store
from rl_plugins.errors import DeadlineExceeded, EngineLost
from rl_plugins.weights.layout import LoadWeights, dtype_name, dtype_named
from rl_plugins.weights.shared_memory import WeightUpdateCalls
from rl_plugins.weights.source import WeightMeta, WeightSource

_ALIGNMENT = 16
# One buffer is loaded or packed while the other buffer is in transit.
_BUFFERS = 2


@dataclass(frozen=True)
class Bucket:
    """Tensors of one broadcast.

    Attributes:
        starts: position of each tensor in the bucket, in bytes.
        tensors: descriptions of the tensors.
        nbytes: size of the bucket in bytes.
    """

    starts: tuple[int, ...]
    tensors: tuple[WeightMeta, ...]
    nbytes: int

    def views(self, buffer: Tensor) -> Iterator[tuple[WeightMeta, Tensor]]:
        """Yield each description with the tensor in `buffer`."""
        for start, meta in zip(self.starts, self.tensors, strict=True):
            yield meta, buffer[start : start + meta.nbytes].view(meta.dtype).view(meta.shape)


def buckets(metadata: Sequence[WeightMeta], limit: int) -> list[Bucket]:
    """Divide tensors, in order, into buckets of at most `limit` bytes. A larger tensor gets a bucket alone."""
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
    """The trainer's side of the transport. Every rank constructs a sender and calls the sender's methods.

    Args:
        source: weights of the policy.
        rank: index of this rank; rank 0 calls the engines.
        share: function to send an object of rank 0 to all ranks and to wait for all ranks.
        engines: all engines on rank 0, empty on other ranks.
        find_lost: function for rank 0. Raises `EngineLost` if an engine does not answer.
        num_receivers: number of processes of each engine.
        bucket_bytes: largest size of a bucket, in bytes.
        timeout_s: deadline of every wait for an engine, in seconds.
        host: address of rank 0's machine. The default is the address in Ray's cluster.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        rank: int,
        share: Callable[[Any], Any],
        engines: Sequence[WeightUpdateCalls],
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
        # The buffers are kept, because the first write to new memory is several times slower.
        self._buffers = _buffers(self._buckets)
        if engines:
            self._world_size = 1 + len(engines) * num_receivers
            self._store: ListeningStore | None = ListeningStore(host or own_address(), timeout_s)
        self._together(lambda: self._open(num_receivers, bucket_bytes))

    def _open(self, num_receivers: int, bucket_bytes: int) -> None:
        tensors = [(meta.name, dtype_name(meta.dtype), list(meta.shape)) for meta in self._source.metadata()]
        for number, engine in enumerate(self._engines):
            assert self._store is not None
            engine.listen(
                {
                    "store": asdict(self._store.address),
                    "first_rank": 1 + number * num_receivers,
                    "world_size": self._world_size,
                    "tensors": tensors,
                    "bucket_bytes": bucket_bytes,
                    "timeout_s": self._timeout_s,
                }
            )

    def send(self, version: int) -> None:
        """Replace the weights of all engines by the weights of the source. Collective.

        Raises:
            EngineLost: an engine ended or does not answer. Every rank raises.
            DeadlineExceeded: a living engine did not receive a bucket before the deadline.
            ConnectionError: the connection to a living engine broke. Ranks other than 0 also raise ConnectionError
                for every other error of rank 0.
        """
        self._together(lambda: self._send(version))

    def _together(self, work: Callable[[], None]) -> None:
        """Run `work`, wait until rank 0 has finished, and raise on all ranks if rank 0 failed."""
        lost, failed = False, True
        try:
            work()
            failed = False
        except EngineLost:
            lost = True
            raise
        finally:
            lost, failed = self._share((lost, failed))
        if lost:
            raise EngineLost("rank 0 has lost an engine in a weight update")
        if failed:
            raise ConnectionError("rank 0 could not send the weights to all rollout engines")

    def close(self) -> None:
        """Close the connections to the engines. The next update needs a new sender."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _send(self, version: int) -> None:
        waits = [engine.begin_update(version) for engine in self._engines]
        tensors_left = iter(self._source)
        try:
            try:
                if waits:
                    self._broadcast(tensors_left)
            finally:
                # The iteration is collective, so rank 0 finishes even without engines.
                for _ in tensors_left:
                    pass
            for wait in waits:
                wait()
            # The group is connected. Nobody else may find its members.
            self._store = None
        except (ConnectionError, DeadlineExceeded):
            # Engines must not wait for further buckets.
            self.close()
            self._find_lost()
            _raise_cause(waits)
            raise

    def _broadcast(self, tensors_left: Iterator[tuple[str, Tensor]]) -> None:
        waits_for = f"rank {self._rank} waited {self._timeout_s:.0f} s for the rollout engines to"
        if self._group is None:
            assert self._store is not None, "a failed update needs a new sender"
            with _deadline(f"{waits_for} connect for new weights"):
                self._group = _Group(self._store.address, 0, self._world_size, self._timeout_s)
        group, buffers = self._group, self._buffers
        for number, bucket in enumerate(self._buckets):
            slot = number % _BUFFERS
            with _deadline(f"{waits_for} take part {number - _BUFFERS + 1} of {len(self._buckets)} of the weights"):
                group.finish(slot)
            for meta, place in bucket.views(buffers[slot]):
                name, tensor = next(tensors_left)
                assert name == meta.name, f"the source gave {name} where its metadata has {meta.name}"
                place.copy_(tensor)
            group.broadcast(slot, buffers[slot][: bucket.nbytes])
        for slot in range(len(buffers)):
            with _deadline(f"{waits_for} take the last of {len(self._buckets)} parts of the weights"):
                group.finish(slot)


class GlooReceiver:
    """The engine's side of the transport, in one process of an engine.

    Args:
        load_weights: weight loader of the model.
        number: index of this process in the engine.
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
        store: dict[str, Any],
        first_rank: int,
        world_size: int,
        tensors: list[tuple[str, str, list[int]]],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        """Disconnect from the earlier sender and prepare the connection to a new sender.

        Args:
            store: fields of the `StoreAddress` of the sender's store.
            first_rank: rank of the engine's first process in the group.
            world_size: number of processes in the group.
            tensors: name, dtype and shape of each tensor of the sender.
            bucket_bytes: largest size of a bucket, in bytes.
            timeout_s: deadline of every wait for the sender, in seconds.
        """
        self.disconnect()
        metadata = [WeightMeta(name, dtype_named(dtype), tuple(shape)) for name, dtype, shape in tensors]
        self._buckets, self._timeout_s = buckets(metadata, bucket_bytes), timeout_s
        self._buffers = _buffers(self._buckets)

        def connect() -> _Group:
            return _Group(StoreAddress(**store), first_rank + self._number, world_size, timeout_s)

        self._connect = connect

    def receive(self) -> None:
        """Receive and load all weights once. After a loading error, receive the rest without loading.

        Raises:
            DeadlineExceeded: a bucket did not arrive before the deadline.
            ConnectionError: the sender ended.
            Exception: error of the model's weight loader, raised after the last bucket.
        """
        with closing(self._received()) as parts:
            try:
                for bucket, buffer in parts:
                    self._load_weights((meta.name, tensor) for meta, tensor in bucket.views(buffer))
            except Exception:
                # A model's loader can raise any error, and buckets for other processes still pass through this process.
                # SystemExit is no such error: this process ends, and rank 0 finds the engine lost.
                for _ in parts:
                    pass
                raise

    def _received(self) -> Generator[tuple[Bucket, Tensor], None, None]:
        """Yield each bucket with its buffer. The buffer is valid until the next iteration."""
        assert self._connect is not None, "expect comes first"
        waits_for = f"the engine waited {self._timeout_s:.0f} s for rank 0 to"
        complete = False
        try:
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
            complete = True
        finally:
            if not complete:
                # Rank 0 must not wait for an engine after its last bucket.
                self.disconnect()

    def disconnect(self) -> None:
        """Close the connection to the sender."""
        if self._group is not None:
            self._group.close()
        self._group = None


class _Group:
    """Connected group of rank 0 and all processes of all engines, with the broadcasts in transit.

    Gloo closes the connections when the last reference to the group or to a pending broadcast is gone, and has no
    method to close the connections. Therefore no other object may hold such a reference, not even an error's traceback.
    """

    def __init__(self, address: StoreAddress, rank: int, world_size: int, timeout_s: float) -> None:
        # Separate from the default process group, which belongs to the trainers.
        store = join_store(address, timeout_s)
        self._gloo: Any = torch.distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout_s))
        self._pending: dict[int, Any] = {}

    def broadcast(self, slot: int, flat: Tensor) -> None:
        """Start a broadcast from rank 0, without waiting."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._pending[slot] = self._gloo.broadcast([flat], options)

    def finish(self, slot: int) -> None:
        """Wait for the last broadcast of a slot, if there is one."""
        if slot in self._pending:
            self._pending[slot].wait()

    def close(self) -> None:
        """Close all connections. Waiting processes get an error, except processes with half a bucket."""
        self._pending.clear()
        self._gloo = None


def _buffers(parts: Sequence[Bucket]) -> list[Tensor]:
    size = max((bucket.nbytes for bucket in parts), default=0)
    return [torch.empty(size, dtype=torch.uint8) for _ in range(min(_BUFFERS, len(parts)))]


@contextmanager
def _deadline(waits_for: str) -> Iterator[None]:
    """Convert gloo's only error type, by the text, to DeadlineExceeded or ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if "imed out" in reason or "imeout" in reason:
            raise DeadlineExceeded(waits_for) from None
        raise ConnectionError(f"{waits_for}, and lost a connection: {reason}") from None


def _raise_cause(waits: Sequence[Callable[[], None]]) -> None:
    """Raise the first error of an engine that is not a mere consequence of the broken connection."""
    for wait in waits:
        try:
            wait()
        except (ConnectionError, DeadlineExceeded):
            continue
