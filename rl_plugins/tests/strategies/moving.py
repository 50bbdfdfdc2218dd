"""A strategy that moves the memory of trained engines while the rollout engine samples, as on CUDA; here on CPU."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from rl_plugins.rollout.engine import Generations, SamplingConfig
from rl_plugins.strategies.host_memory import HostMemory
from rl_plugins.strategies.sharded import ShardedStrategy
from rl_plugins.tests.stages import canned


class WatchingRollout(canned.CannedRollout):
    """Checks that trained engines hold no memory when it samples."""

    strategy: Any = None

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        host, tensors = self.strategy._on_host, tensors_of_trained_engines(self.strategy)
        assert tensors and host.nbytes(tensors) == 0
        host.give_back()
        assert (held := host.nbytes(tensors)) > 0
        # What was expected in advance is what there was to free.
        assert self.strategy.optimizer_bytes() + self.strategy.parameter_bytes() == held
        self.strategy.offload_optimizer()
        self.strategy.offload_parameters()
        return super().generate(prompts, sampling, seeds)


def tensors_of_trained_engines(strategy: Any) -> list[Any]:
    """All tensors of the trained engines and of their optimizers."""
    names = strategy._trained()
    return [t for name in names for of in (strategy._optimizer_tensors, strategy._engine_tensors) for t in of(name)]


def moving(strategy: ShardedStrategy) -> ShardedStrategy:
    """The strategy, which has a `WatchingRollout`, made to move memory of the CPU."""
    strategy._on_host = HostMemory("cpu")
    rollout: Any = strategy.rollout
    rollout.strategy = strategy
    return strategy
