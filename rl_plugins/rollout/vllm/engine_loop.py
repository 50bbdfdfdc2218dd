"""Step a vLLM engine while there are requests. Other calls run between two steps.

Therefore requests can start and end while the engine samples, and weights can change in flight. A started request keeps
its tokens and continues with the new weights. vLLM recomputes the KV cache and records the version of each token.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from rl_plugins.rollout.engine import collected
from rl_plugins.rollout.vllm.requests import EngineRequest, engine_input


class EngineLoop:
    """Execution of the requests of one `vllm.LLM` on the current event loop.

    Attributes:
        busy_s: total time of the engine's steps, in seconds.
        steps: number of steps.
    """

    def __init__(self, llm: Any) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self.busy_s, self.steps = 0.0, 0
        # vLLM's own name of each running request.
        self._running: dict[str, str] = {}
        self._finished: dict[str, Any] = {}
        # Newest outputs of each response of the requests that report tokens.
        self._reports: dict[str, dict[int, Any]] = {}
        self._failures: dict[str, BaseException] = {}
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        # Steps stop on hold. vLLM is paused only if the hold began with unfinished requests.
        self._on_hold, self._vllm_paused = False, False
        self._forgotten = 0

    @property
    def busy(self) -> bool:
        """True if requests are unfinished."""
        return bool(self._running)

    def start(self, requests: Mapping[str, EngineRequest], adapter: Any = None) -> None:
        """Add all requests, or no request if vLLM refuses one.

        Args:
            requests: requests by name.
            adapter: vLLM's request of a LoRA adapter, or None.

        Raises:
            DataError: the engine makes other tokens of the images than the policy's processor.
        """
        added: dict[str, str] = {}
        try:
            for name, request in requests.items():
                prompt = engine_input(self._engine.renderer, request)
                added[name] = self._engine.add_request(name, prompt, request.parameters, lora_request=adapter)
        except BaseException:
            self._abort(added.values())
            raise
        self._running |= added
        self._reports |= {name: {} for name, request in requests.items() if request.reports_tokens}
        if self._running and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def wait(self, names: Sequence[str], required: Collection[str], count: int) -> dict[str, Any]:
        """Wait for requests and return their outputs.

        Args:
            names: requests to return, if finished.
            required: requests to wait for. With `count` 0, these alone are returned.
            count: least number of finished requests to wait for.

        Raises:
            BaseException: error of the engine during a named request.
            RuntimeError: a new session removed all requests.
        """
        forgotten = self._forgotten
        async with self._changed:
            while True:
                if self._forgotten != forgotten:
                    raise RuntimeError(
                        "other training workers have begun, and their session removed the requests of this session"
                    )
                for name in names:
                    if name in self._failures:
                        raise self._failures.pop(name)
                done = [name for name in names if name in self._finished]
                if len(done) >= count and set(required) <= set(done):
                    return {name: self._finished.pop(name) for name in collected(done, required, count)}
                await self._changed.wait()

    def abort(self, names: Collection[str] | None = None) -> None:
        """End and remove requests and their failures, by default of all requests."""
        names = {*self._running, *self._finished, *self._failures} if names is None else names
        self._abort([self._running.pop(name) for name in names if name in self._running])
        for name in names:
            self._finished.pop(name, None)
            self._failures.pop(name, None)
            self._reports.pop(name, None)

    def _abort(self, requests: Iterable[str]) -> None:
        # Given our names, vLLM would keep its record of a request with several responses, and the finished responses.
        self._engine.abort_request(list(requests), internal=True)

    def tokens_so_far(self, names: Sequence[str]) -> dict[str, list[list[int]]]:
        """Return the tokens of each response of running requests that report tokens, by name."""
        return {
            name: [list(report[place].token_ids) for place in sorted(report)]
            for name in names
            if (report := self._reports.get(name))
        }

    def _reported(self, output: Any) -> Any:
        """Keep the output of a step; return the output with all responses."""
        if (report := self._reports.get(output.request_id)) is not None:
            # vLLM returns the responses of a request one by one.
            report |= {completion.index: completion for completion in output.outputs}
            if output.finished:
                output.outputs = [report[place] for place in sorted(report)]
                del self._reports[output.request_id]
        return output

    def forget(self) -> None:
        """Remove all requests and failures. Calls of `wait` raise after the next `go_on`."""
        self.abort()
        self._forgotten += 1

    def hold(self) -> None:
        """Pause the steps until `go_on`."""
        self._on_hold = True
        if self._running and not self._vllm_paused:
            # An engine in a separate process steps without a call.
            self._llm.sleep(level=0, mode="keep")
            self._vllm_paused = True

    async def go_on(self) -> None:
        """Continue the steps. While memory of the engine is asleep, the pause goes on.

        A step of an engine in a separate process waits for an output, so a step before `wake_up` would never end.
        """
        if not self._vllm_paused or self._llm.wake_up(["scheduling"]):
            self._on_hold = self._vllm_paused = False
        async with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        try:
            while self._running:
                if self._on_hold:
                    async with self._changed:
                        await self._changed.wait_for(lambda: not self._on_hold)
                    # All requests may have ended in the pause, and an engine without requests may never answer.
                    continue
                start = time.perf_counter()
                outputs = [self._reported(output) for output in self._engine.step()]
                done = {output.request_id: output for output in outputs if output.finished}
                self.busy_s += time.perf_counter() - start
                self.steps += 1
                if done:
                    for name in done:
                        del self._running[name]
                    self._finished |= done
                    async with self._changed:
                        self._changed.notify_all()
                await asyncio.sleep(0)
        except EngineDeadError:
            # A process of the engine has ended, so the state of the engine is lost.
            os._exit(1)
        except BaseException as error:
            # Each `wait` for a running request raises the error.
            failed = set(self._running)
            self.abort(failed)
            self._failures |= dict.fromkeys(failed, error)
            async with self._changed:
                self._changed.notify_all()
