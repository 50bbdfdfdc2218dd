"""Binding of rollout engines to the GPUs of the training ranks.

Each training worker reserves a whole GPU in Ray. A colocated engine reserves nothing: Ray starts the engine on the
machine of its ranks, and `CUDA_VISIBLE_DEVICES` shows the engine the GPUs of exactly these ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.rollout.vllm.config import VLLMConfig

_GIB = 2**30
_ROOM_S = 60.0
"""Longest wait for memory of a process that has just ended, such as the engine of an earlier worker group."""
_LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class RankGPU:
    """GPU of a training rank.

    Attributes:
        node: Ray's id of the machine.
        gpu: name of the GPU in `CUDA_VISIBLE_DEVICES`.
        free_bytes: free memory of the GPU.
        total_bytes: memory of the GPU.
    """

    node: str
    gpu: str
    free_bytes: int = field(default=0, compare=False)
    total_bytes: int = field(default=0, compare=False)


def gpu_of_this_rank(config: VLLMConfig | None = None, deadline_s: float = _ROOM_S) -> RankGPU:
    """Return the current GPU of this process.

    Args:
        config: settings of a new engine, whose memory the function waits for, because the memory of an ended process
            is free some seconds late; None: no wait.
        deadline_s: longest wait in seconds.
    """
    import ray
    import torch

    end = time.monotonic() + deadline_s
    free, total = torch.cuda.mem_get_info()
    while config is not None and free < config.needed_bytes(total) and time.monotonic() < end:
        time.sleep(_LOOK_AGAIN_S)
        free, total = torch.cuda.mem_get_info()
    index = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[index] if visible else str(index)
    return RankGPU(ray.get_runtime_context().get_node_id(), name, free, total)


def lacking_room(gpus: Mapping[int, RankGPU], config: VLLMConfig) -> str:
    """Return the reason why an engine cannot start on a GPU, with the needed and the free memory; empty with room.

    Args:
        gpus: GPU of each training rank with a new engine.
        config: settings of the engine.
    """
    for rank, gpu in gpus.items():
        needed = config.needed_bytes(gpu.total_bytes)
        if gpu.free_bytes < needed:
            return (
                f"{config.memory_option}: the rollout engine of training worker {rank} needs "
                f"{needed / _GIB:.1f} of the {gpu.total_bytes / _GIB:.1f} GiB of GPU {gpu.gpu}, but training and other "
                f"processes leave {gpu.free_bytes / _GIB:.1f} GiB free: lower the setting, give the strategy "
                "offload={'policy': 'while_sampling'} (in a recipe: strategy.offload.policy=while_sampling), or end "
                "the processes that nvidia-smi shows"
            )
    return ""


def engine_places(ranks: Sequence[RankGPU], tensor_parallel_size: int) -> list[dict[str, Any]]:
    """Return the place of each engine on the GPUs of neighbouring ranks: Ray's options, and `environment`.

    Args:
        ranks: GPU of each training rank.
        tensor_parallel_size: number of GPUs of each engine.

    Raises:
        ConfigError: the engines cannot divide the ranks, or the ranks of an engine are on two machines or share a GPU.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if len(ranks) % tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide the {len(ranks)} training workers, and every "
            "colocated engine needs the GPUs of as many workers: set a divisor"
        )
    if len(set(ranks)) < len(ranks):
        raise ConfigError("two training workers share a GPU: give each worker a whole GPU")
    places = []
    for first in range(0, len(ranks), tensor_parallel_size):
        own = ranks[first : first + tensor_parallel_size]
        if len({rank.node for rank in own}) > 1:
            raise ConfigError(
                f"tensor_parallel_size={tensor_parallel_size}: training workers {first} to {first + len(own) - 1} are "
                "on several machines, and the GPUs of an engine must be on one machine. Set a smaller size, or a "
                "number of workers that fills whole machines"
            )
        environment = {
            "CUDA_VISIBLE_DEVICES": ",".join(rank.gpu for rank in own),
            # Ray would hide all GPUs from an actor that reserves none.
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }
        places.append(
            {
                "num_cpus": 0,
                "num_gpus": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(own[0].node, soft=False),
                "environment": environment,
            }
        )
    return places
