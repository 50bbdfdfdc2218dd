"""vLLM engines as a rollout engine of a training rank: samples, weights and memory of the whole fleet."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_plugins.errors import ConfigError, EngineLost
from rl_plugins.memory import MemoryChange
from rl_plugins.ranks import barrier, broadcast
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples, SamplingConfig
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.fleet import Fleet
from rl_plugins.rollout.vllm.fleet_sampling import FleetSampling
from rl_plugins.weights.check import tolerance_of
from rl_plugins.weights.gloo import GlooSender
from rl_plugins.weights.layout import dtype_named
from rl_plugins.weights.shared_memory import ReceiverLost, Run, SharedMemorySender
from rl_plugins.weights.source import AdaptedWeightSource, WeightSource


class VLLMRollout:
    """vLLM engines in Ray actors of their own, which all training ranks share.

    The object is small and may be sent to the ranks; whoever calls `start` or `connect` first starts the actors.
    Starting them early (on the driver) lets them come up beside the trainers. Every engine gets the weights of all
    ranks; a rank's prompts go to the engines beside it.

    Args:
        config: the settings of each engine.
        name: of the actors; ranks that use the same name share the engines.
        num_engines: how many there are. More than one on GPUs have GPUs of their own (NCCL).
        num_gpus: Ray's share of GPUs for each actor (colocated: the fraction that the trainers leave).

    Raises:
        ConfigError: several engines that share GPUs with the ranks.
    """

    def __init__(
        self, config: VLLMConfig, *, name: str | None = None, num_engines: int = 1, num_gpus: float = 0.0
    ) -> None:
        if num_engines > 1 and config.backend == "ipc":
            raise ConfigError(
                f"{num_engines} rollout engines that share GPUs with the workers: use rollout.engines=1, or "
                "placement.rollout=split for engines with GPUs of their own"
            )
        self.config = config
        self.name = name or f"vllm-{uuid.uuid4().hex[:8]}"
        self._fleet = Fleet(config, self.name, num_engines, num_gpus)
        self._sampling = FleetSampling(self._fleet)
        self._send: Callable[[int], None] | None = None
        self._sender: SharedMemorySender | GlooSender | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process looks the actors up by name."""
        return {**self.__dict__, "_sampling": None, "_send": None, "_sender": None}

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights outlive a sleep."""
        return not self.config.sleeps or self.config.sleep != "all"

    @property
    def sleeps(self) -> bool:
        """Whether engines and trainers take turns."""
        return self.config.sleeps

    @property
    def check_updates(self) -> int:
        """Every how many weight updates they are checked; 0 for never."""
        return self.config.check_updates

    @property
    def log_prob_tolerance(self) -> float:
        """That of the engines' dtype."""
        return tolerance_of(dtype_named(self.config.dtype))

    @property
    def num_living(self) -> int:
        """Engines that have the weights."""
        return len(self._fleet.living)

    @property
    def busy_s(self) -> float:
        """Mean over the engines beside this rank."""
        return self._sampling.busy_s

    def start(self, places: Sequence[Mapping[str, Any]] = ()) -> None:
        """Start the actors, or find those of this name; does not wait for them.

        Args:
            places: Ray's options of each actor: where it runs, and what it takes; by default its share of GPUs.
        """
        self._fleet.start(places)

    def connect(self, rank: int, world_size: int) -> None:
        """Wait for the engines beside this rank.

        Raises:
            DeadlineExceeded: an engine did not come up in time.
        """
        self._fleet.start()
        self._fleet.rank, self._fleet.world_size = rank, world_size
        self._sampling = FleetSampling(self._fleet)
        self._fleet.wait_until_ready()
        self._fleet.each("begin_session")
        # No rank samples or sends weights before the engines have forgotten the workers of before.
        barrier()

    # Sampling ---------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample this rank's prompts. Collective."""
        return self._sampling.generate(prompts, sampling, seeds)

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Have groups sampled. Collective if they begin together."""
        self._sampling.submit(requests, sampling, together=together)

    def collect(self, required: Sequence[int], count: int) -> Mapping[int, RemoteSamples]:
        """Wait for groups; returns those that are finished."""
        return self._sampling.collect(required, count)

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Responses that any rank has collected."""
        return self._sampling.fetch(finished)

    def drop(self, tickets: Sequence[int]) -> None:
        """End groups, and forget them."""
        self._sampling.drop(tickets)

    def lost_tickets(self) -> list[int]:
        """Of groups that went with an engine that was lost; to be submitted again."""
        return self._sampling.lost_tickets()

    def drop_lost_engines(self) -> int:
        """Go on without the engines that any rank has lost; returns how many they are. Collective."""
        lost = self._fleet.drop_lost()
        self._disconnect()
        return lost

    # Weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights, or the adapter alone, and name their version. Collective.

        Raises:
            ConfigError: the engine was made for an adapter, and the policy has none.
        """
        if self._fleet.returning and self._fleet.add_restarted():
            self._disconnect()
        if self.config.lora_rank:
            self._send_adapter(source, version)
            return
        try:
            if self._send is None:
                self._send = self._make_sender(source)
            self._send(version)
        except ReceiverLost as error:
            raise self._fleet.mark_lost(self._fleet.living[error.position], silent=error.silent) from error

    def check_weights(self, source: WeightSource) -> None:
        """Compare what is in the engines' memory with the source (CPU; on CUDA only the probe looks). Collective."""
        if isinstance(self._sender, SharedMemorySender):
            self._sender.check(source, self._checksums)

    def _checksums(self, position: int, runs: list[Run]) -> list[list[int]]:
        engine, timeout_s = self._fleet.living[position], self.config.update_timeout_s
        wait = self._fleet.begin(engine, "checksums", runs, timeout_s=timeout_s, phase="check of a weight update")
        checksums: list[list[int]] = wait()
        return checksums

    def _send_adapter(self, source: WeightSource, version: int) -> None:
        import ray

        if not isinstance(source, AdaptedWeightSource):
            raise ConfigError("rollout.lora=adapter, and the policy has no adapter: use rollout.lora=merged")
        files = source.adapter_files()
        lost = False
        if self._fleet.rank == 0:
            once = ray.put(files)
            timeout_s = self.config.update_timeout_s
            waits = [
                self._fleet.begin(engine, "load_adapter", once, version, timeout_s=timeout_s, phase="adapter update")
                for engine in self._fleet.living
            ]
            for wait in waits:
                try:
                    wait()
                except EngineLost:
                    lost = True
        if broadcast(lost):
            raise EngineLost("an engine was lost in an adapter update")

    def _make_sender(self, source: WeightSource) -> Callable[[int], None]:
        # All that is waited for is the other side.
        timeout_s = min(self.config.update_timeout_s, self.config.stall_timeout_s)
        # Rank 0 talks to the engines.
        speaks = self._fleet.rank == 0
        receivers = [EngineWeightClient(self._fleet, engine) for engine in self._fleet.living] if speaks else []
        if self.config.backend == "shared_memory":
            self._sender = SharedMemorySender(
                source,
                rank=self._fleet.rank,
                world_size=self._fleet.world_size,
                broadcast=broadcast,
                engines=receivers,
                num_engines=len(self._fleet.living),
                num_receivers=self.config.tensor_parallel_size,
                keeps_weights=self.keeps_weights,
                timeout_s=timeout_s,
            )
            return self._sender.send
        if self.config.backend == "gloo":
            self._sender = GlooSender(
                source,
                rank=self._fleet.rank,
                share=broadcast,
                engines=receivers,
                find_lost=self._fleet.find_lost,
                num_receivers=self.config.tensor_parallel_size,
                bucket_bytes=self.config.bucket_mb * 2**20,
                timeout_s=timeout_s,
            )
            return self._sender.send
        from rl_plugins.rollout.vllm.cuda_transport import SeveralEngines, make_cuda_sender

        clients = [WeightSyncClient(self._fleet, engine) for engine in self._fleet.living]
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
        self._send = self._sender = None

    # Memory and the rest ----------------------------------------------------------------------------------------

    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Of an engine beside this rank."""
        log_probs: list[float] = self._fleet.begin(
            self._fleet.engines_of_rank[0],
            "prompt_log_probs",
            prompt,
            timeout_s=self.config.generate_timeout_s,
            phase="prompt_log_probs",
        )()
        return log_probs

    def sleep(self) -> MemoryChange | None:
        """Give back what `sleep` of the settings names; the rank that speaks for an engine returns what that did."""
        changes: list[MemoryChange] = self._fleet.each("sleep") if self.config.sleeps else []
        return MemoryChange.total(changes) if changes else None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it back; on CPU memory comes back by itself."""
        if self.config.sleeps and self.config.device == "cuda":
            self._fleet.each("wake_up", None if tags is None else list(tags))

    def abort(self) -> None:
        """End every unfinished request of the engines."""
        self._fleet.each("abort")

    def close(self) -> None:
        """Forget the connection; the actors end with their Ray job."""
        self._disconnect()
        self._fleet.actors = []

    def stop(self) -> None:
        """End the actors."""
        self._fleet.stop()
        self.close()


class WeightSyncClient:
    """vLLM's `VLLMWeightSyncClient` protocol over the actor, with deadlines."""

    def __init__(self, fleet: Fleet, engine: int) -> None:
        self._fleet, self._engine = fleet, engine

    def _call(self, method: str, *arguments: Any) -> None:
        timeout_s, phase = self._fleet.config.update_timeout_s, f"weight update ({method})"
        self._fleet.begin(self._engine, method, *arguments, timeout_s=timeout_s, phase=phase)()

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


class EngineWeightClient:
    """What rank 0 asks of an actor in an update that the processes of its engine take in one call."""

    def __init__(self, fleet: Fleet, engine: int) -> None:
        self._fleet, self._engine = fleet, engine

    def init(self, init_info: dict[str, Any]) -> None:
        """See `shared_memory.Engine`."""
        self._begin("init_weight_transfer_engine", {"expect": init_info})()

    def load(self, version: int) -> Callable[[], None]:
        """See `shared_memory.Engine`."""
        return self._begin("load_weights", version)

    def _begin(self, method: str, *arguments: Any) -> Callable[[], None]:
        timeout_s, phase = self._fleet.config.update_timeout_s, f"weight update ({method})"
        return self._fleet.begin(self._engine, method, *arguments, timeout_s=timeout_s, phase=phase)
