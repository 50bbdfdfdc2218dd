"""The RolloutEngine of vLLM on a training rank: samples, weights and memory of all engines.

Sampling has two paths:

- Groups of training: `submit` starts groups, `collect` waits for finished groups, and `fetch` returns the responses to
  the rank that trains on a group (`stages/scheduled_sampler.py`). Conversations always use this path.
- Whole batches: `generate` samples all prompts and returns. Callers are validation, greedy baselines, and online
  preference optimization, through `PromptSampler` (`stages/sampling.py`).

The docstring of `rl_plugins.weights` lists the calls of one weight update.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError, DeadlineExceeded, EngineLost
from rl_plugins.memory import MemoryChange
from rl_plugins.ranks import Ranks, barrier, broadcast
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.fleet import Fleet
from rl_plugins.rollout.vllm.fleet_sampling import FleetSampling
from rl_plugins.weights.check import tolerance_of
from rl_plugins.weights.checkpoint_layout import CheckpointLayout
from rl_plugins.weights.gloo import GlooSender
from rl_plugins.weights.layout import dtype_named
from rl_plugins.weights.shared_memory import ElementRange, ReceiverLost, SharedMemorySender
from rl_plugins.weights.source import AdaptedWeightSource, WeightSource

if TYPE_CHECKING:
    from rl_plugins.rollout.vllm.cuda_transport import IpcSender
    from rl_plugins.rollout.vllm.nccl import NcclSender

    WeightSender = SharedMemorySender | GlooSender | IpcSender | NcclSender


class VLLMRollout:
    """vLLM engines in separate Ray actors, shared by all training ranks.

    The object is small and can be sent to the ranks. The first call of `start`, `prepare` or `connect` starts the
    actors. An early call of `start` on the driver lets actors and trainers start at the same time. Every engine gets
    the weights of all ranks; a rank's prompts go to the engines of the rank.

    Engines with the transport `ipc` share the GPUs of the ranks: `prepare` starts one engine on the GPUs of every
    `tensor_parallel_size` ranks.

    Args:
        config: settings of each engine.
        name: prefix of the actors' names. Ranks with the same name share the engines.
        num_engines: number of engines; unused with the transport `ipc`.
        num_gpus: number of GPUs that each actor reserves in Ray; unused with the transport `ipc`.
    """

    def __init__(
        self, config: VLLMConfig, *, name: str | None = None, num_engines: int = 1, num_gpus: float = 0.0
    ) -> None:
        self.config = config
        self.name = name or f"vllm-{uuid.uuid4().hex[:8]}"
        self._fleet = Fleet(config, self.name, num_engines, num_gpus)
        self._sampling = FleetSampling(self._fleet)
        self._sender: WeightSender | None = None
        self._layout: CheckpointLayout | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the connections: a copy in another process finds the actors by name."""
        return {**self.__dict__, "_sampling": None, "_sender": None}

    @property
    def keeps_weights(self) -> bool:
        """True if the engines keep their weights during sleep."""
        return not self.config.sleeps or self.config.sleep != "all"

    @property
    def sleeps(self) -> bool:
        """True if engines and trainers take turns."""
        return self.config.sleeps

    @property
    def gpu_share(self) -> float | None:
        """Share of a GPU for an engine on CUDA; None if an argument of vLLM sets the size of the KV cache."""
        sets_cache = self.config.kv_cache_bytes is not None
        return None if self.config.device == "cpu" or sets_cache else self.config.gpu_memory_utilization

    @property
    def shares_gpus(self) -> bool:
        """True if the engines share the GPUs of the ranks."""
        return self.config.shares_gpus

    @property
    def check_updates(self) -> int:
        """Number of weight updates between two checks; 0 disables checks."""
        return self.config.check_updates

    @property
    def log_prob_tolerance(self) -> float:
        """Tolerance of the engines' dtype."""
        return tolerance_of(dtype_named(self.config.dtype))

    @property
    def num_living(self) -> int:
        """Number of engines with current weights."""
        return len(self._fleet.living)

    @property
    def busy_s(self) -> float:
        """Mean working time of this rank's engines, in seconds."""
        return self._sampling.busy_s

    def start(self, places: Sequence[Mapping[str, Any]] = ()) -> None:
        """Start the actors, or find running actors of the same name, without waiting.

        Args:
            places: Ray's options (place and resources) of each actor. By default each actor reserves `num_gpus`.
        """
        self._fleet.start(places)

    def prepare(self, ranks: Ranks) -> None:
        """Start the engines, or the lost engines again, on the GPUs of the ranks, and wait for them. Collective.

        Other engines start without waiting.

        Raises:
            ConfigError: the engines cannot have the GPUs of the ranks, or every rank has engines of its own.
            DeadlineExceeded: an engine did not start before the deadline.
        """
        if self.config.shares_gpus:
            self._fleet.start_on_gpus_of(ranks)
            self._disconnect()
            return
        if len(set(ranks.gather(self.name))) > 1:
            raise ConfigError(
                "every rank has rollout engines of its own: use RayZeroStrategy or RayFSDPStrategy, or name engines "
                "(VLLMRollout(name=...)) and let all ranks join one Ray cluster (RAY_ADDRESS)"
            )
        self._fleet.start()

    def check_policy(self, weight_source: Callable[[], WeightSource]) -> None:
        """Check the adapter of the policy, if updates send the adapter alone.

        Raises:
            ConfigError: the policy has no adapter, or an adapter that vLLM cannot apply.
        """
        if self.config.lora_rank:
            self._adapted(weight_source()).check_adapter()

    def connect(self, rank: int, world_size: int) -> None:
        """Wait for the engines of this rank.

        Raises:
            DeadlineExceeded: an engine did not start before the deadline.
        """
        # The sender of an earlier training sends the weights of that policy.
        self._disconnect()
        self._fleet.start()
        self._fleet.rank, self._fleet.world_size = rank, world_size
        self._sampling = FleetSampling(self._fleet)
        self._fleet.wait_until_ready()
        self._fleet.each("begin_session")
        # No rank samples or sends weights before all engines have dropped the state of earlier workers.
        barrier()

    # Sampling ---------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample the prompts of this rank. Collective."""
        return self._sampling.generate(prompts, sampling, seeds)

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Submit groups. Collective if `together`."""
        self._sampling.submit(requests, sampling, together=together)

    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations | RemoteSamples]:
        """Wait for groups, and return the finished groups by ticket."""
        return self._sampling.collect(required, count)

    def tokens_so_far(self, tickets: Sequence[int]) -> dict[int, list[list[int]]]:
        """Return the tokens of groups in progress that the engines have reported since the last call."""
        return self._sampling.tokens_so_far(tickets)

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Return the responses of groups collected by any rank."""
        return self._sampling.fetch(finished)

    def drop(self, tickets: Sequence[int]) -> None:
        """End and remove groups."""
        self._sampling.drop(tickets)

    def lost_tickets(self, among: Container[int] | None = None) -> list[int]:
        """Return the tickets of groups on lost engines, for a new submission."""
        return self._sampling.lost_tickets(among)

    def drop_lost_engines(self) -> int:
        """Stop using the engines lost by any rank; return the number of lost engines. Collective."""
        lost = self._fleet.drop_lost()
        self._disconnect()
        return lost

    # Weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights, or the adapter alone, and set the policy version. Collective.

        Raises:
            ConfigError: the engine expects an adapter, and the policy has no adapter.
        """
        self._fleet.share_warm_engines()
        if self._fleet.returning and self._fleet.add_restarted():
            self._disconnect()
        if not self._fleet.living:
            raise EngineLost("all vLLM engines are lost")
        if self.config.lora_rank:
            self._send_adapter(source, version)
            return
        try:
            if self._sender is None:
                # The sender keeps its first source, which reads the live weights.
                self._sender = self._make_sender(self._in_checkpoint(source))
            self._sender.send(version)
        except ReceiverLost as error:
            raise self._fleet.mark_lost(self._fleet.living[error.position], silent=error.silent, cause=error) from error

    def check_weights(self, source: WeightSource) -> None:
        """Compare the engines' memory with the source. Only with shared memory on CPU. Collective."""
        if isinstance(self._sender, SharedMemorySender):
            self._sender.check(self._in_checkpoint(source), self._checksums)

    def _in_checkpoint(self, source: WeightSource) -> WeightSource:
        """Return the weights with the names that the engines load."""
        if self._layout is None:
            trusted = self.config.trust_remote_code
            self._layout = CheckpointLayout.of(self.config.model, source.metadata(), trust_remote_code=trusted)
        return self._layout.apply(source)

    def _checksums(self, position: int, ranges: list[ElementRange]) -> list[list[int]]:
        engine, timeout_s = self._fleet.living[position], self.config.update_timeout_s
        wait = self._fleet.begin(engine, "checksums", ranges, timeout_s=timeout_s, phase="check of a weight update")
        checksums: list[list[int]] = wait()
        return checksums

    def _adapted(self, source: WeightSource) -> AdaptedWeightSource:
        if not isinstance(source, AdaptedWeightSource):
            raise ConfigError(
                f"lora_rank={self.config.lora_rank} in VLLMConfig, and the policy has no adapter: set lora_rank=0"
            )
        return source

    def _send_adapter(self, source: WeightSource, version: int) -> None:
        import ray

        files = self._adapted(source).adapter_files()
        lost = False
        if self._fleet.rank == 0:
            files_ref = ray.put(files)
            timeout_s = self.config.update_timeout_s
            waits = [
                self._fleet.begin(
                    engine, "load_adapter", files_ref, version, timeout_s=timeout_s, phase="adapter update"
                )
                for engine in self._fleet.living
            ]
            for wait in waits:
                try:
                    wait()
                except EngineLost:
                    lost = True
        if broadcast(lost):
            raise EngineLost("an engine was lost in an adapter update")

    def _make_sender(self, source: WeightSource) -> WeightSender:
        # Transports wait for the engines only, so the shorter deadline applies.
        timeout_s = min(self.config.update_timeout_s, self.config.stall_timeout_s)
        engines = [CpuWeightClient(self._fleet, engine) for engine in self._fleet.living if self._fleet.rank == 0]
        if self.config.backend == "shared_memory":
            return SharedMemorySender(
                source,
                rank=self._fleet.rank,
                world_size=self._fleet.world_size,
                broadcast=broadcast,
                engines=engines,
                num_engines=len(self._fleet.living),
                num_receivers=self.config.tensor_parallel_size,
                keeps_weights=self.keeps_weights,
                timeout_s=timeout_s,
            )
        if self.config.backend == "gloo":
            return GlooSender(
                source,
                rank=self._fleet.rank,
                share=broadcast,
                engines=engines,
                find_lost=self._fleet.find_lost,
                num_receivers=self.config.tensor_parallel_size,
                bucket_bytes=self.config.bucket_mb * 2**20,
                timeout_s=timeout_s,
            )
        from rl_plugins.rollout.vllm.cuda_transport import SeveralEngines, make_cuda_sender

        clients = [CudaWeightClient(self._fleet, engine) for engine in self._fleet.living]
        return make_cuda_sender(
            self.config,
            source,
            client=SeveralEngines(clients, self.config.tensor_parallel_size) if len(clients) > 1 else clients[0],
            rank=self._fleet.rank,
            num_engines=len(clients),
        )

    def _disconnect(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    # Memory and the rest ----------------------------------------------------------------------------------------

    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Return the log-probs computed by an engine of this rank."""
        log_probs: list[float] = self._fleet.begin(
            self._fleet.engines_of_rank[0],
            "prompt_log_probs",
            prompt,
            timeout_s=self.config.generate_timeout_s,
            phase="prompt_log_probs",
        )()
        return log_probs

    def sleep(self) -> MemoryChange | None:
        """Free the memory named by `config.sleep`. The first rank of an engine returns the change, others None."""
        changes: list[MemoryChange] = self._fleet.each("sleep") if self.config.sleeps else []
        return MemoryChange.total(changes) if changes else None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again on CUDA, and continue unfinished groups. On CPU, writes allocate the memory."""
        continues = tags is None or "kv_cache" in tags
        if self.config.sleeps and (continues or self.config.device == "cuda"):
            self._fleet.each("wake_up", None if tags is None else list(tags))

    def close(self) -> None:
        """Close the connections. Engines on the GPUs of the ranks end, and other engines end with their Ray job."""
        self._disconnect()
        self._fleet.leave()

    def stop(self) -> None:
        """End the actors."""
        self._fleet.stop()
        self.close()


class CudaWeightClient:
    """Calls to one actor in updates by CUDA IPC or NCCL: vLLM's `VLLMWeightSyncClient` protocol, with deadlines."""

    def __init__(self, fleet: Fleet, engine: int) -> None:
        self._fleet, self._engine = fleet, engine

    def _call(self, method: str, *arguments: Any, must_answer: bool = True) -> None:
        timeout_s, phase = self._fleet.config.update_timeout_s, f"weight update ({method})"
        try:
            self._fleet.begin(
                self._engine, method, *arguments, timeout_s=timeout_s, phase=phase, must_answer=must_answer
            )()
        except DeadlineExceeded as late:
            raise self._fleet.mark_lost(self._engine, silent=True, cause=late) from late

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the transport."""
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Start an update."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Send one chunk of weights: a bucket by IPC, all weights by NCCL. An engine that receives answers nothing."""
        self._call("update_weights", update_info, must_answer=self._fleet.config.shares_gpus)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update."""
        self._call("finish_weight_update", weight_version)

    def set_policy_version(self, version: int) -> None:
        """Set the policy version of future samples."""
        self._call("set_policy_version", version)


class CpuWeightClient:
    """Calls of rank 0 to one actor in updates by shared memory or gloo."""

    def __init__(self, fleet: Fleet, engine: int) -> None:
        self._fleet, self._engine = fleet, engine

    def listen(self, init_info: dict[str, Any]) -> None:
        """Let the processes of the engine listen for the training ranks."""
        self._begin("init_weight_transfer_engine", {"expect": init_info})()

    def begin_update(self, version: int) -> Callable[[], None]:
        """Start an update, and return a function that waits for the end."""
        return self._begin("run_weight_update", version)

    def _begin(self, method: str, *arguments: Any) -> Callable[[], None]:
        timeout_s, phase = self._fleet.config.update_timeout_s, f"weight update ({method})"
        return self._fleet.begin(self._engine, method, *arguments, timeout_s=timeout_s, phase=phase)
