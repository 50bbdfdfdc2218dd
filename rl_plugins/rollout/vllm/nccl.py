"""Weight updates over NCCL by vLLM's own sender and receiver, which end when an engine or the sender is lost.

NCCL waits without a deadline for all members of a group, so the loss of one member would stop all others for ever. The
calls of the engines have deadlines. A failed call therefore makes rank 0 end the group: rank 0 aborts its communicator
and writes `_END` into a store, where the engines wait to abort their communicators.

The engines get NCCL's id of the group through Ray. vLLM would send the id as a pickled object through a store without a
secret, so everybody who reaches the store could run code in the engines.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError, Store
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.utils.nccl import unpinned_nccl_env

from rl_plugins.connections import ListeningStore, StoreAddress, join_store

_END = "end"
# A store measures a wait in milliseconds in 32 bits, so a wait for ever has turns.
_TURN = timedelta(hours=1)
_CONNECT_S = 300.0


@dataclass(frozen=True)
class NcclGroup:
    """Group of rank 0 and all processes of all engines.

    Attributes:
        host: address of rank 0's machine.
        world_size: number of processes.
        bucket_bytes: size of a bucket, in bytes.
    """

    host: str
    world_size: int
    bucket_bytes: int


@dataclass(kw_only=True)
class NcclInitInfo(NCCLWeightTransferInitInfo):
    """Arguments of vLLM's receiver, and the fields of the address of the store with the end of the group."""

    store: dict[str, Any]


class UpdateClient:
    """vLLM's `VLLMWeightSyncClient` protocol. The first failure stays here until the end of the update.

    The ranks gather the weights together, so rank 0 must not leave an update before the other ranks. After a failure,
    the engines are not called any more.

    Args:
        client: client of the engines; not used on ranks other than 0.
        on_failure: function called after the first failure.
    """

    def __init__(self, client: VLLMWeightSyncClient, on_failure: Callable[[], None] = lambda: None) -> None:
        self._client, self._on_failure = client, on_failure
        self.failure: BaseException | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the transport."""
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Start an update."""
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Send one chunk of weights."""
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update."""
        self._call("finish_weight_update", weight_version)

    def set_policy_version(self, version: int) -> None:
        """Set the policy version of future samples, or raise the failure of the update."""
        self._call("set_policy_version", version)
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """Keep an error, and tell the sender."""
        self.failure = self.failure or error
        self._on_failure()

    def _call(self, method: str, *arguments: Any) -> None:
        if self.failure is None:
            try:
                getattr(self._client, method)(*arguments)
            except BaseException as error:
                # `set_policy_version` raises the error.
                self.fail(error)


class NcclSender:
    """The side of a training rank: rank 0 broadcasts the weights to all engines.

    Args:
        group: address and sizes of the group.
        rank: index of this rank.
        client: client of the engines.
        source: weights of the policy.
    """

    def __init__(self, group: NcclGroup, *, rank: int, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        self._rank, self._source = rank, source
        self._engine: NCCLTrainerWeightTransferEngine | None = None
        self._store: ListeningStore | None = None
        self._over = Event()
        self._client = UpdateClient(client, self._end_group)
        self._connect(group)

    def send(self, version: int) -> None:
        """Send the weights and set their version. Collective.

        Raises:
            EngineLost: an engine was lost. The next update needs a new sender.
        """
        if self._engine is None or self._client.failure is not None:
            # The iteration is collective.
            for _ in self._source:
                pass
        else:
            self._engine.send_weights()
        if self._rank == 0:
            self._client.set_policy_version(version)

    def close(self) -> None:
        """Leave the group. The engines leave the group, too, and free its memory."""
        self._end_group()
        if self._engine is not None:
            self._engine.shutdown()

    def _connect(self, group: NcclGroup) -> None:
        """Open the transport, or keep the failure of an engine until the end of the update."""
        device = torch.accelerator.current_device_index()

        def connect() -> None:
            try:
                with torch.accelerator.device_index(device):
                    self._engine = self._open(group)
            except BaseException as error:
                self._client.fail(error)
            finally:
                self._over.set()

        # Without all engines, NCCL waits in this thread until the end of the process.
        Thread(target=connect, daemon=True, name="connect-to-engines").start()
        self._over.wait()

    def _open(self, group: NcclGroup) -> NCCLTrainerWeightTransferEngine:
        """Return vLLM's sender. On rank 0, connect to the processes of the engines."""
        engine = NCCLTrainerWeightTransferEngine(
            client=self._client,
            source=self._source,
            is_sender=self._rank == 0,
            packed_buffer_size_bytes=group.bucket_bytes,
        )
        if self._rank != 0:
            return engine
        self._store = ListeningStore(group.host, _CONNECT_S)
        with unpinned_nccl_env():
            unique_id = bytes(pynccl.NCCLLibrary().ncclGetUniqueId().internal)
        init_info = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "store": asdict(self._store.address),
            "rank_offset": 1,
            "world_size": group.world_size,
            "packed": engine.packed,
            "packed_buffer_size_bytes": engine.packed_buffer_size_bytes,
            "packed_num_buffers": engine.packed_num_buffers,
        }
        # All processes connect at the same time.
        with ThreadPoolExecutor(1) as threads:
            joined = threads.submit(self._client.init_weight_transfer_engine, init_info)
            device = torch.accelerator.current_device_index()
            engine.model_update_group = uid_init_process_group(unique_id, 0, group.world_size, device)
            joined.result()
        return engine

    def _end_group(self) -> None:
        self._over.set()
        group = None if self._engine is None else self._engine.model_update_group
        if group is not None and not group.disabled:
            assert self._store is not None
            store = join_store(self._store.address, _CONNECT_S)
            store.set(_END, "")
            # The answer comes after the engines have got the end. The store may be gone soon.
            store.get(_END)
            _abort(group)


class NcclReceiver(NCCLWeightTransferEngine):
    """The side of an engine, in each of its processes."""

    init_info_cls: type[NCCLWeightTransferInitInfo] = NcclInitInfo

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the group of a new sender, and wait in the background for the end of the group."""
        assert isinstance(init_info, NcclInitInfo)
        super().init_transfer_engine(init_info)
        store = join_store(StoreAddress(**init_info.store), _CONNECT_S)
        arguments = (self.model_update_group, store)
        Thread(target=_abort_at_end, args=arguments, daemon=True, name="end-of-nccl-group").start()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive all weights.

        Raises:
            ConnectionError: the sender ended the group.
        """
        try:
            super().receive_weights(update_info)
            if self.model_update_group is None or self.model_update_group.disabled:
                raise ConnectionError("rank 0 ended a weight update, because an engine was lost")
        except BaseException:
            # vLLM would add the tensors of the next update to the received tensors.
            self.finish_weight_update()
            raise


def _abort_at_end(communicator: PyNcclCommunicator, store: Store) -> None:
    try:
        _wait_for_end(store)
    finally:
        # Also without a store: otherwise the engine would wait for a lost rank 0 for ever.
        if not communicator.disabled:
            _abort(communicator)


def _wait_for_end(store: Store) -> None:
    """Wait until rank 0 ends the group, or the process of rank 0 has ended, and the store with the process.

    Raises:
        DistStoreError: the store failed.
    """
    with suppress(DistNetworkError):
        while True:
            start = time.monotonic()
            try:
                store.wait([_END], _TURN)
                return
            except DistStoreError:
                # Torch has one type of error for the end of a turn, after which the group lives, and for failures.
                if time.monotonic() - start < 0.5 * _TURN.total_seconds():
                    raise


def _abort(communicator: PyNcclCommunicator) -> None:
    """End all operations of a communicator, and free its memory. Later operations do nothing."""
    # First, because another thread must start no operation on a freed communicator.
    communicator.disabled = True
    with torch.accelerator.device_index(communicator.device.index):
        communicator.nccl.ncclCommAbort(communicator.comm)
