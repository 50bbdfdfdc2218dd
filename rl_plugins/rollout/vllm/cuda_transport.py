"""Weights to a vLLM engine on CUDA, through vLLM's own trainer engines: IPC when colocated, NCCL when split."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.base import WeightSource as VLLMWeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.weights import WeightSource


class _Source(VLLMWeightSource):
    """Our source under vLLM's base class."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self._source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._source)


def make_cuda_sender(config: VLLMConfig, source: WeightSource, *, client: Any, rank: int) -> Callable[[int], None]:
    """A function that sends the source's weights and names their version. Every rank makes and calls it."""
    bucket_bytes = config.bucket_mb * 2**20
    info: Any
    if config.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=bucket_bytes)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        info = NCCLTrainerInitInfo(
            rank=rank,
            master_address=socket.gethostbyname(socket.gethostname()),
            master_port=port,
            world_size=1 + config.tensor_parallel_size,
            packed=True,
            packed_buffer_size_bytes=bucket_bytes,
        )
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=_Source(source))

    def send(version: int) -> None:
        engine.send_weights()
        if rank == 0:
            client.set_policy_version(version)

    return send
