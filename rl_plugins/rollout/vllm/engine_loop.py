"""Steps a vLLM engine for as long as it has requests; between two steps everything else gets its turn.

So requests come and go while others are sampled, and weights change in flight: a request that was begun goes on with
the new weights, from the tokens it has (vLLM recomputes its KV cache and keeps account of which weights sampled what).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm.inputs.engine import tokens_input
from vllm.v1.engine.exceptions import EngineDeadError


class EngineLoop:
    """Runs the requests of one `vllm.LLM` on the event loop that it is used on.

    Attributes:
        busy_s: seconds in steps of the engine so far.
        steps: how many there were.
    """

    def __init__(self, llm: Any) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self.busy_s, self.steps = 0.0, 0
        self._running: set[str] = set()
        self._finished: dict[str, Any] = {}
        self._failures: dict[str, BaseException] = {}
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._held, self._paused = False, False
        self._forgotten = 0

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._running)

    def start(self, requests: Mapping[str, tuple[list[int], Any]], adapter: Any = None) -> None:
        """Add requests, all or, if one is refused, none.

        Args:
            requests: by their names, the prompt's token ids and vLLM's sampling parameters.
            adapter: of vLLM, if the requests use one.
        """
        added: list[str] = []
        try:
            for name, (prompt, parameters) in requests.items():
                self._engine.add_request(name, tokens_input(prompt), parameters, lora_request=adapter)
                added.append(name)
        except BaseException:
            self._engine.abort_request(added)
            raise
        self._running.update(added)
        if self._running and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def wait(self, names: Sequence[str], required: Collection[str], count: int) -> dict[str, Any]:
        """Outputs of the named requests that are finished: all that are required, and `count` of them at least.

        Raises:
            BaseException: what ended the engine's work on one of them.
            RuntimeError: all requests were forgotten in the meantime.
        """
        forgotten = self._forgotten
        async with self._changed:
            while True:
                if self._forgotten != forgotten:
                    raise RuntimeError("other training workers have begun, and these requests are forgotten")
                for name in names:
                    if name in self._failures:
                        raise self._failures.pop(name)
                done = [name for name in names if name in self._finished]
                if len(done) >= count and set(required) <= set(done):
                    return {name: self._finished.pop(name) for name in done}
                await self._changed.wait()

    def abort(self, names: Collection[str] | None = None) -> None:
        """End requests, all of them by default, and forget them."""
        names = {*self._running, *self._finished} if names is None else names
        self._engine.abort_request([name for name in names if name in self._running])
        for name in names:
            self._running.discard(name)
            self._finished.pop(name, None)

    def forget(self) -> None:
        """End all requests, whatever failed, and, at the next `go_on`, whoever waits for them."""
        self.abort()
        self._failures.clear()
        self._forgotten += 1

    def hold(self) -> None:
        """No steps from now on until `go_on`."""
        self._held = True
        if self._running and not self._paused:
            # An engine in a process of its own takes steps without being asked.
            self._llm.sleep(level=0, mode="keep")
            self._paused = True

    async def go_on(self) -> None:
        """Steps again."""
        self._held = False
        if self._paused:
            self._llm.wake_up(["scheduling"])
            self._paused = False
        async with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        try:
            while self._running:
                if self._held:
                    async with self._changed:
                        await self._changed.wait_for(lambda: not self._held)
                    # All may have been ended meanwhile: an engine without requests may never answer.
                    continue
                start = time.perf_counter()
                done = {output.request_id: output for output in self._engine.step() if output.finished}
                self.busy_s += time.perf_counter() - start
                self.steps += 1
                if done:
                    self._running -= done.keys()
                    self._finished |= done
                    async with self._changed:
                        self._changed.notify_all()
                await asyncio.sleep(0)
        except EngineDeadError:
            # A process of the engine has ended, and with it all that the engine knew.
            os._exit(1)
        except BaseException as error:
            # Whoever waits for one of these requests raises it.
            self._failures |= dict.fromkeys(self._running, error)
            self.abort(set(self._running))
            async with self._changed:
                self._changed.notify_all()
