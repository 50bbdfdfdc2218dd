"""A strategy that moves the memory of trained engines while the rollout engine samples, as on CUDA; here on CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.rollout.engine import Generations
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.memory import HostMemory, TrainingMemory
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.stages import canned


class WatchingRollout(canned.CannedRollout):
    """Checks that trained engines hold no memory when it samples."""

    strategy: Any = None

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        memory = self.strategy.rollout_phases.memory
        host, tensors = memory.host, tensors_of_trained_models(memory)
        assert tensors and host.nbytes(tensors) == 0
        host.give_back()
        assert (held := host.nbytes(tensors)) > 0
        # What was expected in advance is what there was to free.
        assert memory.optimizer_bytes() + memory.parameter_bytes() == held
        memory.offload_optimizer()
        memory.offload_parameters()
        return super().generate(prompts, sampling, seeds)


def tensors_of_trained_models(memory: TrainingMemory) -> list[Tensor]:
    """All tensors of the trained models and of their optimizers."""
    return [*memory.optimizer_tensors(), *memory.model_tensors()]


def moving(strategy: ZeroStrategy | FSDPStrategy) -> Any:
    """The strategy, which has a `WatchingRollout`, made to move memory of the CPU."""
    strategy.rollout_phases.memory.host = HostMemory("cpu")
    engine: Any = strategy.rollout_phases.engine
    engine.strategy = strategy
    return strategy
