"""A vLLM engine in the calling process, for sampling without training, Ray and weight updates."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Container, Coroutine, Mapping, Sequence
from threading import Thread
from typing import Any, TypeVar

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import DeadlineExceeded
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples
from rl_plugins.rollout.vllm.config import VLLMConfig

R = TypeVar("R")


class OfflineVLLM:
    """The engine of training, in the calling process: a `GroupSampler`. A process can have one OfflineVLLM.

    The engine runs in a thread, so the engine samples while the caller does other work.

    Args:
        config: settings of the engine. Environment variables with a value keep the value.

    Raises:
        ConfigError: vLLM refuses the model or an option.
        DeadlineExceeded: the engine has not answered a call within `config.generate_timeout_s`.
    """

    def __init__(self, config: VLLMConfig) -> None:
        for name, value in config.environment.items():
            os.environ.setdefault(name, value)
        from rl_plugins.rollout.vllm.actor import VLLMActor

        self._engine, self._timeout_s = VLLMActor(config, ends_by_kill=False), config.generate_timeout_s
        self._events = asyncio.new_event_loop()
        Thread(target=self._events.run_forever, name="vllm", daemon=True).start()
        self._run(self._engine.ready())
        self._run(self._engine.begin_session())

    def _run(self, call: Coroutine[Any, Any, R]) -> R:
        name: str = getattr(call, "__name__")  # noqa: B009  # a coroutine of Python has a name, and its type has none
        answer = asyncio.run_coroutine_threadsafe(call, self._events)
        try:
            return answer.result(self._timeout_s)
        except TimeoutError:
            # The call itself may have passed a deadline.
            if answer.done():
                raise
            answer.cancel()
            raise DeadlineExceeded(
                f"the vLLM engine of this process has not answered {name} within {self._timeout_s:g} s"
            ) from None

    def sample_groups(self, requests: Sequence[GroupRequest], sampling: SamplingConfig) -> Generations:
        """Sample groups without caches of earlier calls. The same call gives the same responses."""
        self._run(self._engine.drop_prefixes())
        self.submit(requests, sampling)
        ended = self.collect([request.ticket for request in requests], 0)
        return Generations.concat([ended[request.ticket] for request in requests])

    # Groups, see `GroupSampler` -------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Start groups, without waiting."""
        self._run(self._engine.submit(0, [0] if together else [], requests, sampling))

    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations]:
        """Wait for groups, and return the finished groups by ticket."""
        return self._run(self._collect(required, count))

    async def _collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations]:
        lengths, _ = await self._engine.collect(0, required, count)
        _, generations = await self._engine.fetch([(0, ticket) for ticket in lengths])
        return dict(zip(lengths, generations.split([len(of_group) for of_group in lengths.values()]), strict=True))

    def tokens_so_far(self, tickets: Sequence[int]) -> Mapping[int, list[list[int]]]:
        """Return the tokens of groups in progress."""
        return self._run(self._engine.tokens_so_far(0, tickets))

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Return the responses, which are already in this process."""
        return [responses for responses in finished if isinstance(responses, Generations)]

    def drop(self, tickets: Sequence[int]) -> None:
        """End and remove groups."""
        self._run(self._engine.drop(0, tickets))

    def lost_tickets(self, among: Container[int] | None = None) -> list[int]:
        """Return an empty list: the engine ends with this process."""
        return []
