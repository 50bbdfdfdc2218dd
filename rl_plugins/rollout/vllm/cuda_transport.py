"""Weight transport to vLLM engines on CUDA by vLLM's trainer engines: IPC if colocated, NCCL if split.

With IPC, every rank gathers each tensor once, into a bucket on its own GPU. Rank 0 sends the handles of all buckets to
all engines, and each process of an engine opens the bucket on its own GPU. While the engines load a bucket, the ranks
gather the tensors of the next bucket. With NCCL, vLLM itself gathers and sends at the same time.
"""

from __future__ import annotations

import math
from collections import ChainMap, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from typing_extensions import override
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

from rl_plugins.ranks import barrier, gather
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.nccl import NcclGroup, NcclSender, UpdateClient
from rl_plugins.weights.source import WeightSource


class _Source(VLLMWeightSource):
    """A WeightSource as a subclass of vLLM's source."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self._source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Training writes the weights on this stream.
        return _gathered_on(torch.cuda.default_stream(), iter(self._source))


def _gathered_on(
    stream: torch.cuda.Stream, weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather on one stream, also if the reader changes its stream.

    vLLM's sender over NCCL fills its buckets on several streams in turn. Parts of a gathered parameter may be in
    several buckets, so each stream must wait for the gather.
    """
    while True:
        with torch.cuda.stream(stream):
            item = next(weights, None)
        if item is None:
            return
        reader = torch.cuda.current_stream()
        reader.wait_stream(stream)
        item[1].record_stream(reader)
        yield item


class SourceAhead(_Source):
    """A source whose next tensors can be gathered before the sender asks for them."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._rest: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._gathered: deque[tuple[str, torch.Tensor]] = deque()

    @override
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._rest = self._copies()
        self._gathered.clear()
        while item := self._gathered.popleft() if self._gathered else next(self._rest, None):
            yield item

    def gather(self, nbytes: int) -> None:
        """Gather the next tensors, about `nbytes` bytes. Collective."""
        held = sum(tensor.nbytes for _, tensor in self._gathered)
        while held < nbytes and (item := next(self._rest, None)):
            self._gathered.append(item)
            held += item[1].nbytes

    def _copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        # A sharded model frees a layer when the next layer is gathered, and the sender still has the tensor that did
        # not fit into the present bucket.
        return ((name, tensor.detach().clone()) for name, tensor in self._source)


class SeveralEngines:
    """vLLM's `VLLMWeightSyncClient` protocol for several engines. Each call runs on all engines at once.

    Args:
        clients: client of each engine.
        processes: number of processes of each engine. Processes of an engine have consecutive ranks in the group.
    """

    def __init__(self, clients: Sequence[Any], processes: int) -> None:
        self._clients, self._processes = list(clients), processes

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Open the transport. In a group of NCCL, every engine gets separate ranks."""
        own = [dict(init_info) for _ in self._clients]
        if "rank_offset" in init_info:
            for number, info in enumerate(own):
                info["rank_offset"] += number * self._processes
        self._each("init_weight_transfer_engine", [(info,) for info in own])

    def start_weight_update(self) -> None:
        """Start an update."""
        self._each("start_weight_update", [()] * len(self._clients))

    def update_weights(self, update_info: Any) -> None:
        """Send one chunk of weights."""
        self._each("update_weights", [(update_info,)] * len(self._clients))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update."""
        self._each("finish_weight_update", [(weight_version,)] * len(self._clients))

    def set_policy_version(self, version: int) -> None:
        """Set the policy version of future samples."""
        self._each("set_policy_version", [(version,)] * len(self._clients))

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        threads = ThreadPoolExecutor(len(self._clients))
        calls = [
            threads.submit(getattr(client, method), *own) for client, own in zip(self._clients, arguments, strict=True)
        ]
        # Over NCCL, the other engines wait for a lost engine.
        threads.shutdown(wait=False)
        for call in as_completed(calls):
            call.result()


class _OverlappedIpcEngine(IPCTrainerWeightTransferEngine):
    """vLLM's sender over CUDA IPC. While the engines load a bucket, the ranks gather the tensors of the next bucket.

    The ranks wait for each other on their hosts. In vLLM's sender, kernels of NCCL wait on the GPUs of the engines.
    """

    @override
    def _all_gather_and_merge_handles(self, handles: list[dict[str, tuple[Any, ...]]]) -> list[dict[str, Any]]:
        # As vLLM does, because an engine must not open an unfinished bucket.
        torch.cuda.synchronize()
        of_ranks = gather(handles)
        if not self.is_sender:
            return [{} for _ in handles]
        return [dict(ChainMap(*of_bucket)) for of_bucket in zip(*of_ranks, strict=True)]

    @staticmethod
    @override
    def _post_send_sync() -> None:
        barrier()
        torch.cuda.ipc_collect()

    @override
    def _do_send(self, *arguments: Any, **chunk: Any) -> None:
        assert isinstance(self.source, SourceAhead)
        with ThreadPoolExecutor(1) as threads:
            loaded = threads.submit(super()._do_send, *arguments, **chunk)
            self.source.gather(self.packed_buffer_size_bytes)
            loaded.result()


class IpcSender:
    """The side of a training rank in updates over CUDA IPC, with the methods of `NcclSender`.

    Args:
        info: rank and size of the bucket.
        client: client of the engines.
        source: weights of the policy.
    """

    def __init__(self, info: IPCTrainerInitInfo, *, client: VLLMWeightSyncClient, source: SourceAhead) -> None:
        self._rank, self._client = info.rank, UpdateClient(client)
        self._engine = _OverlappedIpcEngine.trainer_init(info, client=self._client, source=source)

    def send(self, version: int) -> None:
        """Send the weights and set their version. Collective.

        Raises:
            EngineLost: an engine was lost. The next update needs a new sender.
        """
        self._engine.send_weights()
        if self._rank == 0:
            self._client.set_policy_version(version)

    def close(self) -> None:
        """Do nothing: the engines release a bucket at the end of each update."""


def make_cuda_sender(
    config: VLLMConfig, source: WeightSource, *, client: Any, rank: int, num_engines: int = 1
) -> IpcSender | NcclSender:
    """Return the sender of a rank. Every rank calls the function, and the methods of the sender.

    Args:
        config: settings of the engines.
        source: weights of the policy.
        client: client of the engine, or `SeveralEngines`.
        rank: index of this rank.
        num_engines: number of engines.
    """
    bucket_bytes = config.bucket_mb * 2**20
    if config.backend == "ipc":
        # vLLM does not split tensors: the buffer must hold the largest tensor, often the embedding.
        largest = max(meta.dtype.itemsize * math.prod(meta.shape) for meta in source.metadata())
        own = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(bucket_bytes, largest))
        return IpcSender(own, client=client, source=SourceAhead(source))
    import ray

    group = NcclGroup(
        # The address of the host name is often the loopback address.
        host=ray.util.get_node_ip_address(),
        world_size=1 + num_engines * config.tensor_parallel_size,
        bucket_bytes=bucket_bytes,
    )
    return NcclSender(group, rank=rank, client=client, source=_Source(source))
