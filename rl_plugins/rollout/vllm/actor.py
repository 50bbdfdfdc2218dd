"""Ray actor with a vLLM engine. The engine needs a process, because it sets threads, memory and seed of the process.

Training ranks call the actor directly; no batch passes through a driver. `client.py` says who uses `submit`, `collect`
and `fetch`, and who uses `generate`. The `generate` calls of all ranks form one batch: the actor waits for the prompts
of every rank and samples all prompts together. Therefore the result does not depend on the order of the calls. Calls of
`submit` that name ranks do the same.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.images import PromptImages
from rl_plugins.errors import ConfigError, DeadlineExceeded, EngineLost
from rl_plugins.garbage_collection import garbage_collector_off
from rl_plugins.hub.files import model_folder
from rl_plugins.memory import MemoryChange
from rl_plugins.rollout.engine import Generations, GroupRequest
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.engine_files import make_engine_folder, remove_names_of_shared_memory
from rl_plugins.rollout.vllm.requests import (
    EngineRequest,
    RequestBarrier,
    Requests,
    generations_of,
    sampling_parameters,
)
from rl_plugins.weights.shared_memory import ElementRange

_GIB = 2**30
_MEMORY = Path("/dev/shm")
# Ray kills the child processes of an actor before the actor, and reports an actor that ends before as a fault.
_TIME_OF_RAY_S = 2.0


class VLLMActor:
    """Actor with one `vllm.LLM`. Asyncio runs one method at a time, so calls of the engine never overlap.

    Args:
        config: settings of the engine.
        ends_by_kill: True if nobody lets vLLM remove its shared memory: Ray kills an actor and its children.
    """

    @garbage_collector_off()
    def __init__(self, config: VLLMConfig, *, ends_by_kill: bool = True) -> None:
        make_engine_folder()
        from vllm import LLM

        # The import registers weight transports and the plain-weights config, before the construction of the engine.
        from rl_plugins.rollout.vllm import plugin  # noqa: F401
        from rl_plugins.rollout.vllm.engine_loop import EngineLoop
        from rl_plugins.rollout.vllm.executor import end_with
        from rl_plugins.rollout.vllm.start_errors import errors_of_processes, refusal

        self._config = config
        folder = model_folder(config.model, trust_remote_code=config.trust_remote_code)
        # Ray drops the type of an error in this method, so `ready` raises the error.
        self._refusal: ConfigError | None = None
        self._in_session = False
        try:
            with errors_of_processes():
                self._llm = LLM(**config.engine_arguments() | {"model": folder})
        except ValueError as error:
            self._refusal = refusal(config.model, folder, error)
            return
        if ends_by_kill:
            remove_names_of_shared_memory()
        self._llm.update_weight_version("0")
        # On CUDA the engine core has a process of its own.
        if children := multiprocessing.active_children():
            end_with([child.sentinel for child in children], after_s=_TIME_OF_RAY_S)
        self._loop = EngineLoop(self._llm)
        # The trainer would replace a sampled token of an image by an image.
        self._image_token_id: int | None = getattr(self._llm.model_config.hf_config, "image_token_id", None)
        self._adapter: Any = None
        # Reason why the engine cannot sample; None if the engine can sample.
        self._unusable: str | None = None
        if config.sleeps:
            self._sleep_after_start()
        self._barrier = RequestBarrier()
        # Submitted groups of each rank before collection, in the order of submission.
        self._groups: dict[int, list[str]] = {}
        # Outputs of collected groups before `fetch`.
        self._collected: dict[str, Any] = {}
        self._calls = 0
        self._updating = False

    def _sleep_after_start(self) -> None:
        """Leave the memory to the trainers until the first rollout phase, which sends the weights."""
        if self._config.device == "cpu":
            # vLLM writes the whole KV cache at the start.
            self._llm.collective_rpc("give_back", args=(False,))
            return
        with_weights = self._config.sleep == "all"
        if with_weights:
            self._llm.collective_rpc("keep_unsent_weights")
        self._llm.sleep(level=2 if with_weights else 1)
        if with_weights:
            self._unusable = "its weights were given back"

    async def ready(self) -> str:
        """Return vLLM's version once the engine has started.

        Raises:
            ConfigError: vLLM refuses the model or an option.
        """
        import vllm

        if self._refusal is not None:
            raise self._refusal
        return str(vllm.__version__)

    async def progress(self) -> int:
        """Return the number of steps of the engine. The actor answers between two steps.

        Raises:
            EngineLost: the engine has started again, and vLLM has refused the start.
        """
        if self._refusal is not None:
            raise EngineLost(str(self._refusal))
        return self._loop.steps

    async def begin_session(self) -> None:
        """Drop unfinished work of earlier training workers: prompts in the barrier, groups, a part of a weight update.

        Training workers must call `begin_session` before they submit groups or send weights.

        Raises:
            ConfigError: see `ready`.
        """
        if self._refusal is not None:
            raise self._refusal
        self._in_session = True
        self._barrier.cancel()
        self._groups.clear()
        self._collected.clear()
        self._loop.forget()
        self._end_update()
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
        """Sample the prompts of a rank, in one batch with the prompts of the engine's other ranks.

        Args:
            rank: rank of the caller.
            ranks: all ranks of the engine.
            prompts: token ids.
            sampling: options of sampling.
            seeds: one seed per prompt, or None.

        Returns:
            Responses, and the working time of the engine in seconds.

        Raises:
            DeadlineExceeded: another rank did not call before the deadline.
            RuntimeError: the engine's weights were freed, or the last weight update did not finish.
        """
        self._check_session()
        self._calls += 1
        names = [f"{rank}-call-{self._calls}-{position}" for position in range(len(prompts))]
        requests = {
            name: self._request(prompt, sampling, None if seeds is None else seeds[position])
            for position, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        }
        await self._start_together(rank, ranks, requests)
        outputs = await self._loop.wait(names, names, 0)
        return generations_of([outputs[name] for name in names]), self._loop.busy_s

    async def submit(
        self, rank: int, ranks: Sequence[int], requests: Sequence[GroupRequest], sampling: SamplingConfig
    ) -> None:
        """Start groups, in one batch with the groups of `ranks`, or immediately if `ranks` is empty. See `generate`."""
        self._check_session()
        named = {
            _name(rank, request.ticket): self._request(
                request.prompt,
                request.shortened(sampling),
                request.seed,
                request.images,
                reports_tokens=request.reports_tokens,
            )
            for request in requests
        }
        await self._start_together(rank, ranks, named)
        self._groups.setdefault(rank, []).extend(named)

    async def collect(self, rank: int, required: Sequence[int], count: int) -> tuple[dict[int, list[int]], float]:
        """Wait for groups of a rank: all tickets in `required`, and at least `count` groups.

        Returns:
            Lengths of the responses by ticket, and the working time of the engine in seconds.
        """
        self._check_session()
        there = self._groups.setdefault(rank, [])
        outputs = await self._loop.wait(there, [_name(rank, ticket) for ticket in required], count)
        for name in outputs:
            there.remove(name)
        self._collected |= outputs
        lengths = {
            int(name.split("-", 1)[1]): [len(completion.token_ids) for completion in output.outputs]
            for name, output in outputs.items()
        }
        return lengths, self._loop.busy_s

    async def tokens_so_far(self, rank: int, tickets: Sequence[int]) -> dict[int, list[list[int]]]:
        """Return the tokens of each response of a rank's groups in progress that report tokens, by ticket."""
        self._check_session()
        names = {_name(rank, ticket): ticket for ticket in tickets}
        return {names[name]: responses for name, responses in self._loop.tokens_so_far(list(names)).items()}

    async def fetch(self, groups: Sequence[tuple[int, int]]) -> tuple[list[bool], Generations]:
        """Return and release the responses of collected groups.

        Args:
            groups: rank and ticket of each group.

        Returns:
            For each group True if the engine has the group; and the concatenated responses of the found groups.
        """
        self._check_session()
        outputs = [self._collected.pop(_name(*group), None) for group in groups]
        there = [output is not None for output in outputs]
        return there, generations_of([output for output in outputs if output is not None])

    async def drop(self, rank: int, tickets: Sequence[int]) -> None:
        """End and remove groups of a rank."""
        self._check_session()
        names = {_name(rank, ticket) for ticket in tickets}
        self._loop.abort(names)
        for name in names:
            self._collected.pop(name, None)
        # Changed in place, because a pending `collect` waits for the groups in this list.
        groups = self._groups.setdefault(rank, [])
        groups[:] = [name for name in groups if name not in names]

    async def drop_prefixes(self) -> None:
        """Drop cached prefixes. Later samples then do not depend on earlier samples."""
        self._check_session()
        self._llm.reset_prefix_cache(reset_connector=True)

    async def _start_together(self, rank: int, ranks: Sequence[int], requests: Requests) -> None:
        if not ranks:
            self._start_now(requests)
            return
        try:
            await asyncio.wait_for(
                self._barrier.join(rank, ranks, requests, self._start_now), self._config.generate_timeout_s
            )
        except TimeoutError:
            raise DeadlineExceeded(
                f"rank {rank} waited {self._config.generate_timeout_s:.0f} s in generate for ranks "
                f"{self._barrier.missing(ranks)} to hand in their prompts"
            ) from None

    def _request(
        self,
        prompt: list[int],
        sampling: SamplingConfig,
        seed: int | None,
        images: PromptImages | None = None,
        *,
        reports_tokens: bool = False,
    ) -> EngineRequest:
        parameters = sampling_parameters(sampling, seed, self._image_token_id, reports_tokens=reports_tokens)
        return EngineRequest(prompt, parameters, images, reports_tokens)

    def _check_session(self) -> None:
        if not self._in_session:
            raise EngineLost("the engine's process has ended, and Ray has started another one in its place")
        # vLLM refuses calls with an error of its own between the death of its core and the end of this actor.
        core = getattr(self._llm.llm_engine, "engine_core", None)
        if getattr(getattr(core, "resources", None), "engine_dead", False) is True:
            os._exit(1)

    def _start_now(self, requests: Requests) -> None:
        self._check_session()
        if self._unusable is not None:
            raise RuntimeError(f"the engine cannot sample: {self._unusable}; a weight update comes first")
        self._loop.start(requests, self._adapter)

    # Weights --------------------------------------------------------------------------------------------------------

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the transport."""
        self._check_session()
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    async def start_weight_update(self) -> None:
        """Start an update. The engine does not sample until `set_policy_version`."""
        self._check_session()
        self._end_update()
        self._loop.hold()
        self._llm.start_weight_update()
        self._updating = True
        self._unusable = "its last weight update did not end"

    async def update_weights(self, update_info: Any) -> None:
        """Receive one chunk of weights."""
        self._check_session()
        self._llm.update_weights({"update_info": update_info})

    def _end_update(self) -> None:
        """End an update that did not finish, after the loss of another engine or a failure of a worker."""
        if self._updating:
            self._llm.collective_rpc("end_weight_update")
            self._updating = False

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update and drop all caches of the old weights, caches of running requests included."""
        self._check_session()
        self._llm.finish_weight_update(weight_version=weight_version)
        self._updating = False
        self._drop_caches()

    def _drop_caches(self) -> None:
        """Drop the caches of prompts and of images, also those of running requests.

        Raises:
            ConfigError: a connector of the KV cache keeps the cache of the old weights.
        """
        if not self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise ConfigError(
                "the connector of the KV cache cannot drop the cache of the old weights: leave kv_transfer_config and "
                "kv_offloading_size out (in a recipe: rollout.vllm)"
            )
        if self._llm.model_config.is_multimodal_model:
            self._llm.llm_engine.reset_encoder_cache()

    async def run_weight_update(self, version: int) -> None:
        """Run a whole update in one call, for transports without a call per chunk."""
        await self.start_weight_update()
        await self.update_weights({})
        await self.finish_weight_update(str(version))
        await self.set_policy_version(version)

    async def load_adapter(self, files: dict[str, bytes], version: int) -> None:
        """Replace the adapter and drop cached prefixes of the old adapter.

        Args:
            files: peft's files of the adapter, by name.
            version: version of the policy.
        """
        from vllm.lora.request import LoRARequest

        self._check_session()
        self._loop.hold()
        self._unusable = "its last weight update did not end"
        # vLLM loads adapters from folders. The folder is in memory if the machine has /dev/shm.
        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self._llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
        # Requests use a name without a folder, or every batch would load the adapter again.
        self._adapter = LoRARequest("policy", 1, "loaded")
        self._drop_caches()
        await self.set_policy_version(version)

    async def checksums(self, ranges: list[ElementRange]) -> list[list[int]]:
        """Return `SharedMemoryReceiver.checksums` of each process of the engine."""
        self._check_session()
        checksums: list[list[int]] = self._llm.collective_rpc("checksums", args=(ranges,))
        return checksums

    async def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Return the log-probs of a prompt's tokens after the first token."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._check_session()
        parameters = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._calls += 1
        name = f"probe-{self._calls}"
        self._start_now({name: EngineRequest(prompt, parameters)})
        output = (await self._loop.wait([name], [name], 1))[name]
        choices = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        return [choice[token].logprob for choice, token in choices]

    async def set_policy_version(self, version: int) -> None:
        """Set the policy version of future samples, and continue sampling."""
        self._check_session()
        self._llm.update_weight_version(str(version))
        self._unusable = None
        await self._loop.go_on()

    # Memory ---------------------------------------------------------------------------------------------------------

    async def sleep(self) -> MemoryChange:
        """Free the KV cache, and with `sleep="all"` the weights; return the measured change.

        Unfinished requests keep their tokens, and continue after `wake_up` or the next weight update.

        Raises:
            RuntimeError: the KV cache is in use.
        """
        self._check_session()
        with_weights = self._config.sleep == "all"
        if self._loop.busy:
            self._loop.hold()
        if not self._llm.reset_prefix_cache(reset_running_requests=self._loop.busy):
            raise RuntimeError("the engine cannot sleep: its KV cache is in use")
        if self._config.device == "cpu":
            freed = self._llm.collective_rpc("give_back", args=(with_weights,))
            changes = [MemoryChange(*numbers) for numbers in freed]
        else:
            awake = self._llm.collective_rpc("device_memory")
            # `keep`, because vLLM would end unfinished requests.
            self._llm.sleep(level=2 if with_weights else 1, mode="keep")
            asleep = self._llm.collective_rpc("device_memory")
            # The used memory of a GPU also changes with other processes. The engine frees its own allocations.
            changes = [
                MemoryChange(used, used - (allocated - left), cache)
                for (used, allocated, cache), (_, left, _) in zip(awake, asleep, strict=True)
            ]
        if with_weights:
            self._unusable = "its weights were given back"
        return MemoryChange.total(changes)

    async def wake_up(self, tags: list[str] | None) -> None:
        """Allocate the memory again on CUDA, and continue unfinished requests with all memory and current weights.

        On CPU, writes allocate the memory.

        Raises:
            ConfigError: the memory does not fit beside the memory of the trainers. The message has both numbers.
        """
        self._check_session()
        if self._config.device == "cuda":
            self._check_memory_to_wake(tags)
            self._llm.wake_up(tags)
        if self._unusable is None:
            await self._loop.go_on()

    def _check_memory_to_wake(self, tags: list[str] | None) -> None:
        for needed, free in self._llm.collective_rpc("memory_to_wake", args=(tags,)):
            if needed > free:
                raise ConfigError(
                    f"{self._config.memory_option}: the rollout engine needs {needed / _GIB:.1f} GiB for "
                    f"{' and '.join(tags or ['weights', 'kv_cache'])}, but training leaves {free / _GIB:.1f} GiB of "
                    "the GPU free: lower the setting, give the strategy offload={'policy': 'while_sampling'}, or raise "
                    "tensor_parallel_size (in a recipe: strategy.offload.policy=while_sampling, "
                    "rollout.tensor_parallel_size)"
                )


def _name(rank: int, ticket: int) -> str:
    return f"{rank}-{ticket}"
