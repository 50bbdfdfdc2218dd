"""A strategy for tests on CPU: the memory of trained engines moves while the rollout engine samples, as on CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.rollout.engine import Generations
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.memory import HostMemory, TrainingMemory
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.stages import canned
from rl_plugins.weights.source import WeightSource


class WatchingRollout(canned.CannedRollout):
    """A rollout engine with a copy of the weights. The engine checks in each sampling that models hold no memory.

    The optimizer's memory is free when the weights are sent. If an optimizer's master weights shared memory with the
    weights, the weights would be freed before the copy.
    """

    strategy: Any = None
    received: Mapping[str, Tensor] = MappingProxyType({})
    on_host: Sequence[str] = ()
    """Names of the models without memory in the last phase."""

    @override
    def update_weights(self, source: WeightSource, version: int) -> None:
        memory = self.strategy.rollout_phases.memory
        assert memory.optimizer_bytes() == 0
        freed = [tensor.shape for tensor in memory.model_tensors() if is_freed(tensor)]
        assert not freed, f"the optimizer's memory is that of weights {freed}"
        assert not any(buffer.any() for buffer in memory.zero_tensors())
        self.received = {name: tensor.clone() for name, tensor in source}
        super().update_weights(source, version)

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        memory = self.strategy.rollout_phases.memory
        host, tensors = HostMemory("cpu"), tensors_to_move(memory)
        assert tensors and host.nbytes(tensors) == 0
        models = self.strategy.lightning_module.named_models()
        self.on_host = [name for name, model in models.items() if all(is_freed(p) for p in model.parameters())]
        memory.reload_parameters()
        memory.reload_optimizer()
        memory.wait_for_optimizer()
        assert (held := host.nbytes(tensors)) > 0
        # The expected bytes equal the freed bytes.
        assert memory.optimizer_bytes() + memory.parameter_bytes() == held
        assert not any(buffer.any() for buffer in memory.zero_tensors())
        weights = dict(self.strategy.weight_source())
        assert self.received.keys() == weights.keys()
        assert all(torch.equal(self.received[name], weight) for name, weight in weights.items())
        memory.offload_optimizer()
        memory.offload_parameters()
        return super().generate(prompts, sampling, seeds)


class LateHostMemory(HostMemory):
    """Host memory of a slow device: the contents come back in `wait`. Before, all numbers are NaN."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self._late: list[tuple[Tensor, Tensor]] = []

    @override
    def move_back(self) -> None:
        storages = [storage for storage, _, _ in self._taken]
        super().move_back()
        for storage in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._late.append((whole, whole.clone()))
            whole.fill_(255)

    @override
    def wait(self) -> None:
        super().wait()
        while self._late:
            whole, contents = self._late.pop()
            whole.copy_(contents)


def is_freed(tensor: Tensor) -> bool:
    """Return True if a tensor with elements has no memory; for a parameter of ZeRO-3, check the shard."""
    tensor = getattr(tensor, "ds_tensor", tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() > 0 and local.untyped_storage().nbytes() == 0


def tensors_to_move(memory: TrainingMemory) -> list[Tensor]:
    """Return all tensors of models and optimizers on the host while the rollout engine samples."""
    return [*memory.optimizer_tensors(), *memory.model_tensors(), *memory.zero_tensors()]


def moving(strategy: ZeroStrategy | FSDPStrategy) -> Any:
    """Return the strategy, with a `WatchingRollout`, changed to move memory of the CPU.

    Only resizable storages can be moved: all of CUDA, but on CPU not the storages of memory-mapped files, such
    as the frozen weights beside an adapter under stages 1 and 2 of ZeRO.
    """
    memory = strategy.rollout_phases.memory
    memory.model_host, memory.optimizer_host = HostMemory("cpu"), LateHostMemory()
    engine: Any = strategy.rollout_phases.engine
    engine.strategy = strategy
    return strategy
