"""Binding of rollout engines to the GPUs of the training ranks.

Each training worker reserves a whole GPU in Ray. A colocated engine reserves nothing: Ray starts the engine on the
machine of its ranks, and `CUDA_VISIBLE_DEVICES` shows the engine the GPUs of exactly these ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.errors import ConfigError


@dataclass(frozen=True)
class RankGPU:
    """GPU of a training rank.

    Attributes:
        node: Ray's id of the machine.
        gpu: name of the GPU in `CUDA_VISIBLE_DEVICES`.
    """

    node: str
    gpu: str


def gpu_of_this_rank() -> RankGPU:
    """Return the current GPU of this process."""
    import ray
    import torch

    index = torch.cuda.current_device()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return RankGPU(ray.get_runtime_context().get_node_id(), visible.split(",")[index] if visible else str(index))


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
