"""A strategy that gives up its memory while the engine samples, as on CUDA; here the memory is the host's own."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from rl_plugins.rollout.engine import Generations, SamplingConfig
from rl_plugins.strategies.host_memory import HostMemory
from rl_plugins.strategies.sharded import ShardedStrategy
from rl_plugins.tests.stages import canned


class WatchingRollout(canned.CannedRollout):
    """Sees that there is nothing left of the trained engines when it samples."""

    strategy: Any = None

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        host, tensors = self.strategy._on_host, everything(self.strategy)
        assert tensors and host.nbytes(tensors) == 0
        host.give_back()
        assert (held := host.nbytes(tensors)) > 0
        # What was expected in advance is what there was to free.
        assert self.strategy.optimizer_bytes() + self.strategy.parameter_bytes() == held
        self.strategy.offload_optimizer()
        self.strategy.offload_parameters()
        return super().generate(prompts, sampling, seeds)


def everything(strategy: Any) -> list[Any]:
    """All that the trained engines and their optimizers hold."""
    names = strategy._trained()
    return [t for name in names for of in (strategy._optimizer_tensors, strategy._engine_tensors) for t in of(name)]


def moving(strategy: ShardedStrategy) -> ShardedStrategy:
    """The strategy, which has a `WatchingRollout`, made to move memory of the CPU."""
    strategy._on_host = HostMemory("cpu")
    rollout: Any = strategy.rollout
    rollout.strategy = strategy
    return strategy
