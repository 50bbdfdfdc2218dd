"""The process that owns a vLLM engine: a Ray actor, because the engine fixes threads, memory and seed of its process.

Training ranks call it directly; no batch goes through a driver. One `generate` of all ranks is one batch: the actor
waits until every rank has handed in its prompts and then samples them together, so that the result does not depend on
which rank came first.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.errors import DeadlineExceeded, EngineLost
from rl_plugins.memory import MemoryChange
from rl_plugins.rollout.engine import Generations, GroupRequest, SamplingConfig
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.weights.shared_memory import Run

_MEMORY = Path("/dev/shm")
Requests = Mapping[str, tuple[list[int], Any]]
"""Token ids of a prompt and how it is sampled, by the name of the request."""


class RequestBarrier:
    """What is begun then does not depend on which rank came first."""

    def __init__(self) -> None:
        self._waiting: dict[int, Requests] = {}
        self._begun: asyncio.Future[None] | None = None

    async def join(
        self, rank: int, ranks: Sequence[int], requests: Requests, begin: Callable[[Requests], None]
    ) -> None:
        """Hand in a rank's requests, and wait until those of all are begun.

        Args:
            rank: this one.
            ranks: all that take part.
            requests: of this rank.
            begin: what the last to come calls with the requests of all, in the order of the ranks.
        """
        if self._begun is None:
            self._begun = asyncio.get_running_loop().create_future()
        begun, self._waiting[rank] = self._begun, requests
        if len(self._waiting) == len(ranks):
            everyones, self._waiting, self._begun = self._waiting, {}, None
            try:
                begin({name: request for one in sorted(everyones) for name, request in everyones[one].items()})
            except BaseException as error:
                begun.set_exception(error)
            else:
                begun.set_result(None)
        # Shielded: one rank's deadline must not cancel the round of the others.
        await asyncio.shield(begun)

    def missing(self, ranks: Sequence[int]) -> list[int]:
        """The ranks that have not come."""
        return sorted(set(ranks) - set(self._waiting))

    def cancel(self) -> None:
        """Forget who has come."""
        if self._begun is not None:
            self._begun.cancel()
        self._waiting, self._begun = {}, None


class VLLMActor:
    """Owns one `vllm.LLM`. Asyncio runs the methods one at a time, so the engine is never entered twice."""

    def __init__(self, config: VLLMConfig) -> None:
        # Registers the weight-transfer backend and the plain-weights config, which must happen before the engine.
        from vllm import LLM

        from rl_plugins.rollout.vllm import plugin  # noqa: F401
        from rl_plugins.rollout.vllm.engine_loop import EngineLoop
        from rl_plugins.rollout.vllm.executor import end_with

        self._config = config
        self._llm = LLM(**config.engine_arguments())
        self._llm.update_weight_version("0")
        if config.device == "cuda":
            # The engine runs in a process of its own there.
            end_with([process.sentinel for process in multiprocessing.active_children()])
        self._loop = EngineLoop(self._llm)
        self._adapter: Any = None
        # What keeps the weights from being sampled with; None if nothing does.
        self._unusable: str | None = None
        if config.device == "cpu" and config.sleeps:
            # vLLM writes the whole KV cache when it makes it.
            self._llm.collective_rpc("give_back", args=(False,))
        self._barrier = RequestBarrier()
        # Of each rank, the groups that it has submitted and not collected, in that order.
        self._groups: dict[int, list[str]] = {}
        # What vLLM gave for groups that were collected and not fetched.
        self._held: dict[str, Any] = {}
        self._calls = 0
        self._updating = False
        self._in_session = False

    async def ready(self) -> str:
        """The engine is up; returns vLLM's version."""
        import vllm

        return str(vllm.__version__)

    async def progress(self) -> int:
        """How many steps the engine has taken; it answers between two of them."""
        return self._loop.steps

    async def begin_session(self) -> None:
        """Forget what earlier training workers left unfinished: prompts of a round, half a weight update.

        It comes before everything that depends on what an engine has been told: groups, and weights.
        """
        self._in_session = True
        self._barrier.cancel()
        self._groups.clear()
        self._held.clear()
        self._loop.forget()
        if self._updating:
            await self.finish_weight_update()
        await self._loop.go_on()

    # Sampling -------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        rank: int,
        ranks: Sequence[int],
        prompts: list[list[int]],
        sampling: SamplingConfig,
        seeds: list[int] | None,
    ) -> tuple[Generations, float]:
        """Sample this rank's prompts, in one batch with those of the other ranks of this engine.

        Args:
            rank: this rank.
            ranks: all that share the engine.
            prompts: token ids.
            sampling: how to sample.
            seeds: one per prompt, or none at all.

        Returns:
            The responses, and the seconds that the engine has worked so far.

        Raises:
            DeadlineExceeded: the other ranks did not come.
            RuntimeError: the weights were given back, or only a part of new ones has come.
        """
        self._calls += 1
        names = [f"{rank}-call-{self._calls}-{position}" for position in range(len(prompts))]
        requests = {
            name: (prompt, _parameters(sampling, None if seeds is None else seeds[position]))
            for position, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        }
        await self._start(rank, ranks, requests)
        outputs = await self._loop.wait(names, names, 0)
        return _generations([outputs[name] for name in names]), self._loop.busy_s

    async def submit(
        self, rank: int, ranks: Sequence[int], requests: Sequence[GroupRequest], sampling: SamplingConfig
    ) -> None:
        """Begin to sample groups, in one batch with those of `ranks`, or at once if that is empty. See `generate`."""
        named = {
            _name(rank, one.ticket): (one.prompt, _parameters(one.shortened(sampling), one.seed)) for one in requests
        }
        await self._start(rank, ranks, named)
        self._groups.setdefault(rank, []).extend(named)

    async def collect(self, rank: int, required: Sequence[int], count: int) -> tuple[dict[int, list[int]], float]:
        """Groups of this rank that are finished: all that are required, and `count` of them at least.

        Returns:
            By their tickets the lengths of the responses, and the seconds that the engine has worked so far.
        """
        self._check_session()
        there = self._groups.setdefault(rank, [])
        outputs = await self._loop.wait(there, [_name(rank, ticket) for ticket in required], count)
        for name in outputs:
            there.remove(name)
        self._held |= outputs
        lengths = {
            int(name.split("-")[1]): [len(completion.token_ids) for completion in output.outputs]
            for name, output in outputs.items()
        }
        return lengths, self._loop.busy_s

    async def fetch(self, groups: Sequence[tuple[int, int]]) -> tuple[list[bool], Generations]:
        """Hand out collected groups, and forget them.

        Args:
            groups: rank and ticket of each.

        Returns:
            Which of them are here, and their responses, one behind the other.
        """
        self._check_session()
        outputs = [self._held.pop(_name(*group), None) for group in groups]
        there = [output is not None for output in outputs]
        return there, _generations([output for output in outputs if output is not None])

    async def drop(self, rank: int, tickets: Sequence[int]) -> None:
        """End groups of this rank, and forget them."""
        names = {_name(rank, ticket) for ticket in tickets}
        self._loop.abort(names)
        for name in names:
            self._held.pop(name, None)
        # In place: a `collect` that has not been answered waits for what is in this list.
        groups = self._groups.setdefault(rank, [])
        groups[:] = [name for name in groups if name not in names]

    async def drop_prefixes(self) -> None:
        """Forget cached prefixes: what is sampled next does not depend on what was sampled before."""
        self._llm.reset_prefix_cache()

    async def _start(self, rank: int, ranks: Sequence[int], requests: Requests) -> None:
        if not ranks:
            self._begin(requests)
            return
        try:
            await asyncio.wait_for(
                self._barrier.join(rank, ranks, requests, self._begin), self._config.generate_timeout_s
            )
        except TimeoutError:
            raise DeadlineExceeded(
                f"rank {rank} waited {self._config.generate_timeout_s:.0f} s in generate for ranks "
                f"{self._barrier.missing(ranks)} to hand in their prompts"
            ) from None

    def _check_session(self) -> None:
        if not self._in_session:
            raise EngineLost("the engine's process has ended, and Ray has started another one in its place")

    def _begin(self, requests: Requests) -> None:
        self._check_session()
        if self._unusable is not None:
            raise RuntimeError(f"the engine cannot sample: {self._unusable}; a weight update comes first")
        self._loop.start(requests, self._adapter)

    # The four calls of vLLM's weight-sync protocol. ----------------------------------------------------------------

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the transport."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    async def start_weight_update(self) -> None:
        """Begin; nothing is sampled until the version of the new weights is named."""
        self._check_session()
        self._loop.hold()
        self._llm.start_weight_update()
        self._updating = True
        self._unusable = "its last weight update did not end"

    async def update_weights(self, update_info: Any) -> None:
        """Take in one chunk."""
        # vLLM ends an update that fails, so there is nothing left to finish.
        self._updating = False
        self._llm.update_weights({"update_info": update_info})
        self._updating = True

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Complete; what is cached belongs to the old weights and goes, that of requests that go on included."""
        self._llm.finish_weight_update(weight_version=weight_version)
        self._updating = False
        self._llm.reset_prefix_cache(reset_running_requests=True)

    async def load_weights(self, version: int) -> None:
        """A whole update in one call, for a transport whose chunks need no calls of their own."""
        await self.start_weight_update()
        await self.update_weights({})
        await self.finish_weight_update(str(version))
        await self.set_policy_version(version)

    async def load_adapter(self, files: dict[str, bytes], version: int) -> None:
        """Put an adapter in the place of the one before; cached prefixes belong to that and go.

        Args:
            files: as peft saves it, by name.
            version: of the policy.
        """
        from vllm.lora.request import LoRARequest

        self._check_session()
        self._loop.hold()
        self._unusable = "its last weight update did not end"
        # vLLM takes adapters from folders; this one is in memory where the machine has such a place.
        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self._llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
        # Requests name what is there, or every batch would read it again.
        self._adapter = LoRARequest("policy", 1, "loaded")
        self._llm.reset_prefix_cache(reset_running_requests=True)
        await self.set_policy_version(version)

    async def checksums(self, runs: list[Run]) -> list[list[int]]:
        """`SharedMemoryReceiver.checksums` of each process of the engine."""
        checksums: list[list[int]] = self._llm.collective_rpc("checksums", args=(runs,))
        return checksums

    async def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Log-probs of a prompt's tokens after the first."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._calls += 1
        name = f"probe-{self._calls}"
        self._begin({name: (prompt, parameters)})
        output = (await self._loop.wait([name], [name], 1))[name]
        choices = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        return [choice[token].logprob for choice, token in choices]

    async def set_policy_version(self, version: int) -> None:
        """Name the weights that samples carry from now on."""
        self._llm.update_weight_version(str(version))
        self._unusable = None
        await self._loop.go_on()

    # Memory ---------------------------------------------------------------------------------------------------------

    async def sleep(self) -> MemoryChange:
        """Give back the KV cache, and the weights if the engine is so configured; returns what that did.

        Requests are unfinished where another engine was lost; after the weight update that follows they begin again
        from the tokens that they have.

        Raises:
            RuntimeError: requests are unfinished on CUDA, where vLLM would end them; the KV cache is in use.
        """
        with_weights = self._config.sleep == "all"
        if self._loop.busy and self._config.device == "cuda":
            raise RuntimeError("the engine cannot sleep: its KV cache is in use by unfinished requests")
        if self._loop.busy:
            self._loop.hold()
        if not self._llm.reset_prefix_cache(reset_running_requests=self._loop.busy):
            raise RuntimeError("the engine cannot sleep: its KV cache is in use")
        if self._config.device == "cpu":
            changes = self._llm.collective_rpc("give_back", args=(with_weights,))
        else:
            held = self._llm.collective_rpc("device_memory")
            self._llm.sleep(level=2 if with_weights else 1)
            left = self._llm.collective_rpc("device_memory")
            changes = [
                MemoryChange(before, after, cache) for (before, cache), (after, _) in zip(held, left, strict=True)
            ]
        if with_weights:
            self._unusable = "its weights were given back"
        return MemoryChange.total(changes)

    async def wake_up(self, tags: list[str] | None) -> None:
        """Take memory back; on CPU it comes by itself when it is written."""
        if self._config.device == "cuda":
            self._llm.wake_up(tags)

    async def abort(self) -> None:
        """End every unfinished request."""
        self._loop.abort()


def _name(rank: int, ticket: int) -> str:
    return f"{rank}-{ticket}"


def _parameters(sampling: SamplingConfig, seed: int | None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=sampling.num_samples,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=bool(sampling.stop),
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _generations(outputs: Sequence[Any]) -> Generations:
    completions = [completion for output in outputs for completion in output.outputs]
    return Generations.from_responses(
        responses=[completion.token_ids for completion in completions],
        # Of the sampled token at each place, and no other.
        log_probs=[[p for p, _ in zip(c.logprobs.logprobs, c.token_ids, strict=True)] for c in completions],
        finish_reasons=[completion.finish_reason for completion in completions],
        policy_versions=[
            [int(span.version) for span in completion.weight_versions for _ in range(span.start, span.end)]
            for completion in completions
        ],
    )
