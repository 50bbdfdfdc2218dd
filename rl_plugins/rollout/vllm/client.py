"""What a training rank holds of a vLLM engine: the actor's handle, deadlines, the trainer's side of the transport."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from rl_plugins.errors import DeadlineExceeded
from rl_plugins.rollout.engine import Generations, SamplingConfig
from rl_plugins.rollout.shared_memory import SharedMemorySender
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.weights import WeightSource


class VLLMRollout:
    """A vLLM engine in a Ray actor of its own, shared by all training ranks.

    The object is small and may be sent to the ranks; whoever calls `start` or `connect` first starts the actor.
    Starting it early (on the driver) lets it come up beside the trainers.

    Args:
        config: the engine's settings.
        name: of the actor; ranks that use the same name share the engine.
        num_gpus: Ray's share of GPUs for the actor (colocated: the fraction that the trainers leave).
    """

    def __init__(self, config: VLLMConfig, *, name: str | None = None, num_gpus: float = 0.0) -> None:
        self.config = config
        self.name = name or f"vllm-{uuid.uuid4().hex[:8]}"
        self._num_gpus = num_gpus
        self._actor: Any = None
        self._rank, self._world_size = 0, 1
        self._send: Callable[[int], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process looks the actor up by name."""
        return {**self.__dict__, "_actor": None, "_send": None}

    def start(self) -> None:
        """Start the actor, or find the one of this name; does not wait for it."""
        import ray

        from rl_plugins.rollout.vllm.actor import VLLMActor

        if self._actor is None:
            self._actor = (
                ray.remote(VLLMActor)
                .options(
                    name=self.name,
                    get_if_exists=True,
                    num_cpus=0,
                    num_gpus=self._num_gpus,
                    max_restarts=-1,
                    max_concurrency=1000,
                    runtime_env={"env_vars": self.config.environment},
                )
                .remote(self.config)
            )

    def connect(self, rank: int, world_size: int) -> None:
        """Wait for the engine and take this rank's place."""
        self.start()
        self._rank, self._world_size = rank, world_size
        self._call("ready", timeout_s=self.config.ready_timeout_s, phase="start-up of the engine")
        self._on_rank_zero("begin_session")
        # No rank samples before the engine has forgotten the workers of before.
        _barrier()

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample this rank's prompts. Collective."""
        result: Generations = self._call(
            "generate", self._rank, self._world_size, prompts, sampling, seeds,
            # The actor's own deadline comes first: it knows which rank is missing.
            timeout_s=self.config.generate_timeout_s + 30, phase="generate",
        )  # fmt: skip
        return result

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights and name their version. Collective."""
        if self._send is None:
            self._send = self._make_sender(source)
        self._send(version)

    def sleep(self, level: int = 1) -> None:
        """Give the engine's memory back (CUDA; a CPU engine keeps its own)."""
        if self.config.device == "cuda":
            self._on_rank_zero("sleep", level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it back."""
        if self.config.device == "cuda":
            self._on_rank_zero("wake_up", None if tags is None else list(tags))

    def abort(self) -> None:
        """End every unfinished request of the engine."""
        self._on_rank_zero("abort")

    def close(self) -> None:
        """Forget the connection; the actor ends with its Ray job."""
        self._send = None
        self._actor = None

    def stop(self) -> None:
        """End the actor."""
        import ray

        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
        self.close()

    def _on_rank_zero(self, method: str, *arguments: Any) -> None:
        if self._rank == 0:
            self._call(method, *arguments, timeout_s=self.config.update_timeout_s, phase=method)

    def _call(self, method: str, *arguments: Any, timeout_s: float, phase: str) -> Any:
        return self._begin(method, *arguments, timeout_s=timeout_s, phase=phase)()

    def _begin(self, method: str, *arguments: Any, timeout_s: float, phase: str) -> Callable[[], Any]:
        import ray

        reference = getattr(self._actor, method).remote(*arguments)

        def wait() -> Any:
            try:
                return ray.get(reference, timeout=timeout_s)
            except ray.exceptions.GetTimeoutError:
                raise DeadlineExceeded(
                    f"rank {self._rank} waited {timeout_s:.0f} s for vLLM engine {self.name!r} in phase {phase!r}"
                ) from None

        return wait

    # Weights ----------------------------------------------------------------------------------------------------

    def _make_sender(self, source: WeightSource) -> Callable[[int], None]:
        if self.config.backend == "shared_memory":
            return SharedMemorySender(
                source,
                rank=self._rank,
                world_size=self._world_size,
                barrier=_barrier,
                broadcast=_broadcast,
                engine=_SharedMemoryEngine(self) if self._rank == 0 else None,
                num_receivers=self.config.tensor_parallel_size,
                timeout_s=self.config.update_timeout_s,
            ).send
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
    """What rank 0 asks of the actor in an update through shared memory."""

    def __init__(self, rollout: VLLMRollout) -> None:
        self._rollout = rollout

    def init(self, init_info: dict[str, Any]) -> None:
        WeightSyncClient(self._rollout).init_weight_transfer_engine({"expect": init_info})

    def load(self, version: int) -> Callable[[], None]:
        return self._rollout._begin(
            "load_weights", version, timeout_s=self._rollout.config.update_timeout_s, phase="weight update"
        )


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
