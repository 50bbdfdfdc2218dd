"""What a training rank holds of vLLM engines: the actors' handles, deadlines, the trainer's side of the transport."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.rollout.engine import Generations, SamplingConfig
from rl_plugins.rollout.memory import MemoryChange
from rl_plugins.rollout.shared_memory import Run, SharedMemorySender
from rl_plugins.rollout.shared_parameters import dtype_named
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.weight_check import tolerance_of
from rl_plugins.rollout.weights import AdaptedWeightSource, WeightSource


class VLLMRollout:
    """vLLM engines in Ray actors of their own: one for all training ranks, or several that each serve some of them.

    The object is small and may be sent to the ranks; whoever calls `start` or `connect` first starts the actors.
    Starting them early (on the driver) lets them come up beside the trainers. Every engine gets the weights of all
    ranks; a rank's prompts go to its own engine.

    Args:
        config: the settings of each engine.
        name: of the actors; ranks that use the same name share the engines.
        num_engines: how many there are; it divides the number of ranks. More than one run on CPU only.
        num_gpus: Ray's share of GPUs for each actor (colocated: the fraction that the trainers leave).

    Raises:
        ConfigError: several engines on GPUs.
    """

    def __init__(
        self, config: VLLMConfig, *, name: str | None = None, num_engines: int = 1, num_gpus: float = 0.0
    ) -> None:
        if num_engines > 1 and config.device != "cpu":
            raise ConfigError(
                f"{num_engines} rollout engines on {config.device}: several engines run on CPU only; "
                "use rollout.engines=1, with rollout.tensor_parallel_size for more GPUs"
            )
        self.config = config
        self.name = name or f"vllm-{uuid.uuid4().hex[:8]}"
        self._num_engines, self._num_gpus = num_engines, num_gpus
        self._actors: list[Any] = []
        self._rank, self._world_size, self._engine = 0, 1, 0
        # The ranks that share this rank's engine; the first of them speaks for it.
        self._sharing: list[int] = [0]
        self._send: Callable[[int], None] | None = None
        self._shared_memory: SharedMemorySender | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process looks the actors up by name."""
        return {**self.__dict__, "_actors": [], "_send": None, "_shared_memory": None}

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights outlive a sleep."""
        return not self.config.sleeps or self.config.sleep != "all"

    @property
    def check_updates(self) -> int:
        """Every how many weight updates they are checked; 0 for never."""
        return self.config.check_updates

    @property
    def log_prob_tolerance(self) -> float:
        """That of the engines' dtype."""
        return tolerance_of(dtype_named(self.config.dtype))

    def start(self) -> None:
        """Start the actors, or find those of this name; does not wait for them."""
        import ray

        from rl_plugins.rollout.vllm.actor import VLLMActor

        if not self._actors:
            self._actors = [
                ray.remote(VLLMActor)
                .options(
                    name=self._label(number),
                    get_if_exists=True,
                    num_cpus=0,
                    num_gpus=self._num_gpus,
                    max_restarts=-1,
                    max_concurrency=1000,
                    runtime_env={"env_vars": self.config.environment},
                )
                .remote(self.config)
                for number in range(self._num_engines)
            ]

    def connect(self, rank: int, world_size: int) -> None:
        """Wait for this rank's engine and take its place there.

        Raises:
            ConfigError: the number of engines does not divide the number of ranks.
            DeadlineExceeded: the engine did not come up in time.
        """
        if world_size % self._num_engines:
            raise ConfigError(
                f"{self._num_engines} rollout engines cannot be shared evenly by {world_size} training workers: "
                "choose a number that divides placement.num_workers"
            )
        self.start()
        share = world_size // self._num_engines
        self._rank, self._world_size, self._engine = rank, world_size, rank // share
        self._sharing = list(range(self._engine * share, (self._engine + 1) * share))
        self._call("ready", timeout_s=self.config.ready_timeout_s, phase="start-up of the engine")
        self._once("begin_session")
        # No rank samples or sends weights before the engines have forgotten the workers of before.
        _barrier()

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample this rank's prompts. Collective."""
        result: Generations = self._call(
            "generate", self._rank, self._sharing, prompts, sampling, seeds,
            # The actor's own deadline comes first: it knows which rank is missing.
            timeout_s=self.config.generate_timeout_s + 30, phase="generate",
        )  # fmt: skip
        return result

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights, or the adapter alone, and name their version. Collective.

        Raises:
            ConfigError: the engine was made for an adapter, and the policy has none.
        """
        if self.config.lora_rank:
            self._send_adapter(source, version)
            return
        if self._send is None:
            self._send = self._make_sender(source)
        self._send(version)

    def check_weights(self, source: WeightSource) -> None:
        """Compare what is in the engines' memory with the source (CPU; on CUDA only the probe looks). Collective."""
        if self._shared_memory is not None:
            self._shared_memory.check(source, self._checksums)

    def _checksums(self, engine: int, runs: list[Run]) -> list[list[int]]:
        wait = self._begin(
            engine, "checksums", runs, timeout_s=self.config.update_timeout_s, phase="check of a weight update"
        )
        checksums: list[list[int]] = wait()
        return checksums

    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Of this rank's engine."""
        timeout_s = self.config.generate_timeout_s
        log_probs: list[float] = self._call("prompt_log_probs", prompt, timeout_s=timeout_s, phase="prompt_log_probs")
        return log_probs

    def sleep(self) -> MemoryChange | None:
        """Give back what `sleep` of the settings names; the rank that speaks for the engine returns what that did."""
        change: MemoryChange | None = self._once("sleep") if self.config.sleeps else None
        return change

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it back; on CPU memory comes back by itself."""
        if self.config.sleeps and self.config.device == "cuda":
            self._once("wake_up", None if tags is None else list(tags))

    def abort(self) -> None:
        """End every unfinished request of the engine."""
        self._once("abort")

    def close(self) -> None:
        """Forget the connection; the actors end with their Ray job."""
        self._send = self._shared_memory = None
        self._actors = []

    def stop(self) -> None:
        """End the actors."""
        import ray

        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self.close()

    def _once(self, method: str, *arguments: Any) -> Any:
        """Call a method of this rank's engine from one of the ranks that share it; None on the others."""
        if self._rank != self._sharing[0]:
            return None
        return self._call(method, *arguments, timeout_s=self.config.update_timeout_s, phase=method)

    def _call(self, method: str, *arguments: Any, timeout_s: float, phase: str) -> Any:
        return self._begin(self._engine, method, *arguments, timeout_s=timeout_s, phase=phase)()

    def _begin(self, engine: int, method: str, *arguments: Any, timeout_s: float, phase: str) -> Callable[[], Any]:
        import ray

        reference = getattr(self._actors[engine], method).remote(*arguments)

        def wait() -> Any:
            try:
                return ray.get(reference, timeout=timeout_s)
            except ray.exceptions.GetTimeoutError:
                raise DeadlineExceeded(
                    f"rank {self._rank} waited {timeout_s:.0f} s for vLLM engine {self._label(engine)!r} "
                    f"in phase {phase!r}"
                ) from None

        return wait

    def _label(self, engine: int) -> str:
        return f"{self.name}-{engine}"

    # Weights ----------------------------------------------------------------------------------------------------

    def _send_adapter(self, source: WeightSource, version: int) -> None:
        import ray

        if not isinstance(source, AdaptedWeightSource):
            raise ConfigError("rollout.lora=adapter, and the policy has no adapter: use rollout.lora=merged")
        files = source.adapter_files()
        if self._rank == 0:
            once = ray.put(files)
            timeout_s = self.config.update_timeout_s
            waits = [
                self._begin(engine, "load_adapter", once, version, timeout_s=timeout_s, phase="adapter update")
                for engine in range(self._num_engines)
            ]
            for wait in waits:
                wait()
        _barrier()

    def _make_sender(self, source: WeightSource) -> Callable[[int], None]:
        if self.config.backend == "shared_memory":
            self._shared_memory = SharedMemorySender(
                source,
                rank=self._rank,
                world_size=self._world_size,
                barrier=_barrier,
                broadcast=_broadcast,
                engines=[_SharedMemoryEngine(self, e) for e in range(self._num_engines)] if self._rank == 0 else [],
                num_engines=self._num_engines,
                num_receivers=self.config.tensor_parallel_size,
                keeps_weights=self.keeps_weights,
                timeout_s=self.config.update_timeout_s,
            )
            return self._shared_memory.send
        from rl_plugins.rollout.vllm.cuda_transport import make_cuda_sender

        return make_cuda_sender(self.config, source, client=WeightSyncClient(self), rank=self._rank)


class WeightSyncClient:
    """vLLM's `VLLMWeightSyncClient` protocol over the actor, with deadlines."""

    def __init__(self, rollout: VLLMRollout) -> None:
        self._rollout = rollout

    def _call(self, method: str, *arguments: Any) -> None:
        timeout_s = self._rollout.config.update_timeout_s
        self._rollout._call(method, *arguments, timeout_s=timeout_s, phase=f"weight update ({method})")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the transport."""
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Begin."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Send one chunk."""
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Complete."""
        self._call("finish_weight_update", weight_version)

    def set_policy_version(self, version: int) -> None:
        """Name the version that samples carry from now on."""
        self._call("set_policy_version", version)


class _SharedMemoryEngine:
    """What rank 0 asks of an actor in an update through shared memory."""

    def __init__(self, rollout: VLLMRollout, engine: int) -> None:
        self._rollout, self._engine = rollout, engine

    def init(self, init_info: dict[str, Any]) -> None:
        self._begin("init_weight_transfer_engine", {"expect": init_info})()

    def load(self, version: int) -> Callable[[], None]:
        return self._begin("load_weights", version)

    def _begin(self, method: str, *arguments: Any) -> Callable[[], None]:
        timeout_s, phase = self._rollout.config.update_timeout_s, f"weight update ({method})"
        return self._rollout._begin(self._engine, method, *arguments, timeout_s=timeout_s, phase=phase)


def _distributed() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _barrier() -> None:
    import torch

    if _distributed():
        torch.distributed.barrier()


def _broadcast(value: Any) -> Any:
    import torch

    if not _distributed():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
