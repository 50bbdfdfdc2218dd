"""Weights to a vLLM engine on CUDA, through vLLM's own trainer engines: IPC when colocated, NCCL when split."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.weights.source import WeightSource


class _Source(VLLMWeightSource):
    """Our source under vLLM's base class."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self._source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._source)


class SeveralEngines:
    """vLLM's `VLLMWeightSyncClient` protocol over several engines, all at once: none goes on without the others.

    Args:
        clients: of each engine.
        processes: of each engine; in the group of a transport they follow each other.
    """

    def __init__(self, clients: Sequence[Any], processes: int) -> None:
        self._clients, self._processes = list(clients), processes

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Open the transport; every engine has ranks of its own in it."""
        first = [init_info["rank_offset"] + number * self._processes for number in range(len(self._clients))]
        self._each("init_weight_transfer_engine", [({**init_info, "rank_offset": offset},) for offset in first])

    def start_weight_update(self) -> None:
        """Begin."""
        self._each("start_weight_update", [()] * len(self._clients))

    def update_weights(self, update_info: Any) -> None:
        """Send one chunk."""
        self._each("update_weights", [(update_info,)] * len(self._clients))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Complete."""
        self._each("finish_weight_update", [(weight_version,)] * len(self._clients))

    def set_policy_version(self, version: int) -> None:
        """Name the version that samples carry from now on."""
        self._each("set_policy_version", [(version,)] * len(self._clients))

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        with ThreadPoolExecutor(len(self._clients)) as threads:
            calls = [
                threads.submit(getattr(client, method), *own)
                for client, own in zip(self._clients, arguments, strict=True)
            ]
        for call in calls:
            call.result()


def make_cuda_sender(
    config: VLLMConfig, source: WeightSource, *, client: Any, rank: int, num_engines: int = 1
) -> Callable[[int], None]:
    """A function that sends the source's weights and names their version. Every rank makes and calls it.

    Args:
        config: of the engines.
        source: the weights.
        client: of the engine; of several `SeveralEngines`, over NCCL.
        rank: this rank.
        num_engines: how many there are.
    """
    bucket_bytes = config.bucket_mb * 2**20
    info: Any
    if config.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        # vLLM cuts no tensor: the largest one, often the embedding, has to fit.
        largest = max(meta.dtype.itemsize * math.prod(meta.shape) for meta in source.metadata())
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(bucket_bytes, largest))
    else:
        import ray
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        info = NCCLTrainerInitInfo(
            rank=rank,
            # Not that of the host's name, which is often the machine's own loopback.
            master_address=ray.util.get_node_ip_address(),
            master_port=port,
            world_size=1 + num_engines * config.tensor_parallel_size,
            packed=True,
            packed_buffer_size_bytes=bucket_bytes,
        )
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=_Source(source))

    def send(version: int) -> None:
        engine.send_weights()
        if rank == 0:
            client.set_policy_version(version)

    return send
