"""A vLLM engine in the calling process, for sampling without training, Ray and weight updates."""

from __future__ import annotations

import asyncio
import os

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.vllm.config import VLLMConfig


class OfflineVLLM:
    """The engine of training, in the calling process. A process can have one OfflineVLLM.

    Args:
        config: settings of the engine. Environment variables with a value keep the value.
    """

    def __init__(self, config: VLLMConfig) -> None:
        for name, value in config.environment.items():
            os.environ.setdefault(name, value)
        from rl_plugins.rollout.vllm.actor import VLLMActor

        self._engine = VLLMActor(config)
        self._events = asyncio.new_event_loop()
        self._events.run_until_complete(self._engine.begin_session())

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int]) -> Generations:
        """Sample responses without caches of earlier calls. The same call gives the same responses.

        Args:
            prompts: token ids.
            sampling: options of sampling.
            seeds: one seed per prompt.
        """
        return self._events.run_until_complete(self._generate(prompts, sampling, seeds))

    async def _generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int]) -> Generations:
        await self._engine.drop_prefixes()
        generations, _ = await self._engine.generate(0, [0], prompts, sampling, seeds)
        return generations
