"""Process group of the training workers of Ray Train, with a store that listens on one address.

Ray's own `TorchConfig` lets torch start a store that listens on all addresses of the machine and answers everybody. A
stranger could change the addresses under which ranks find each other, and ranks unpickle objects of other ranks. Here
the store listens on the address of the machine in Ray, which is the loopback address for Ray of a run's own, and its
keys begin with a random prefix. Torch has no further protection: see `connections`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from ray.train.backend import BackendConfig
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend
from typing_extensions import override

from rl_plugins.addresses import own_address
from rl_plugins.connections import ListeningStore, StoreAddress, join_store

if TYPE_CHECKING:
    from ray.train._internal.base_worker_group import BaseWorkerGroup

_GRACE_S = 60.0
_STORE: list[ListeningStore] = []
"""Store of the group in the process of rank 0. Groups that are made later use the store, too."""


@dataclass
class PrivateTorchConfig(TorchConfig):
    """Settings of the process group of Ray Train's `TorchTrainer`, as its own `TorchConfig`. Recipes use this class.

    Example:
        trainer = TorchTrainer(train, torch_config=rl.PrivateTorchConfig(), scaling_config=...)
    """

    @property
    @override
    def backend_cls(self) -> type[_TorchBackend]:
        return _PrivateTorchBackend


class _PrivateTorchBackend(_TorchBackend):
    @override
    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        import ray

        assert isinstance(backend_config, TorchConfig), "the settings that have named this backend"
        resources, timeout_s = worker_group.get_resources_per_worker(), backend_config.timeout_s
        backend = backend_config.backend or ("nccl" if resources.get("GPU") else "gloo")
        address = worker_group.execute_single(0, _listen, timeout_s)
        worker_group.execute(_set_torch_distributed_env_vars)
        size = len(worker_group)
        started: list[Any] = [
            worker_group.execute_single_async(rank, _join, address, backend, rank, size, timeout_s)
            for rank in range(size)
        ]
        # A rank without the others ends with an error of its own before.
        ray.get(started, timeout=2 * timeout_s + _GRACE_S)


def _listen(timeout_s: float) -> StoreAddress:
    """Start the store of the group, and return its address."""
    _STORE[:] = [ListeningStore(own_address(), timeout_s)]
    return _STORE[0].address


def _join(address: StoreAddress, backend: str, rank: int, world_size: int, timeout_s: float) -> None:
    """Make this process a rank of the group."""
    # Libraries that read these two find the store, and not the keys of the run.
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.host, str(address.port)
    # As Ray Train sets the variable: a late collective ends the process with an error.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    torch.distributed.init_process_group(
        backend,
        store=join_store(address, timeout_s),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
