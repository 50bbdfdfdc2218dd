"""What a training rank holds of vLLM engines: the actors' handles, deadlines, the trainer's side of the transport.

Engines that are lost leave the row of those that work (`row.py`), and come back to it with a weight update when Ray has
started them again; until then the others do their work.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.rollout.engine import EngineLost, Generations, GroupRequest, SamplingConfig
from rl_plugins.rollout.gloo_transport import GlooSender
from rl_plugins.rollout.memory import MemoryChange
from rl_plugins.rollout.shared_memory import ReceiverLost, Run, SharedMemorySender
from rl_plugins.rollout.shared_parameters import dtype_named
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.row import beside, shares
from rl_plugins.rollout.weight_check import tolerance_of
from rl_plugins.rollout.weights import AdaptedWeightSource, WeightSource


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
        self._num_engines, self._num_gpus = num_engines, num_gpus
        self._actors: list[Any] = []
        self._rank, self._world_size = 0, 1
        # The engines that have the weights; the same on every rank, as is who is on the way back.
        self._living = list(range(num_engines))
        self._returning: dict[int, Any] = {}
        # Engines that this rank has lost and the others may not know of yet, and whether they were only silent.
        self._lost: dict[int, bool] = {}
        self._lost_tickets: list[int] = []
        # Groups that were submitted and not collected.
        self._engine_of: dict[int, int] = {}
        self._submitted: dict[Any, int] = {}
        self._polls: dict[Any, int] = {}
        self._finished: dict[int, Generations] = {}
        self._busy_s: dict[int, float] = {}
        self._send: Callable[[int], None] | None = None
        self._shared_memory: SharedMemorySender | None = None
        self._gloo: GlooSender | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process looks the actors up by name."""
        return {**self.__dict__, "_actors": [], "_send": None, "_shared_memory": None, "_gloo": None}

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
        return len(self._living)

    @property
    def busy_s(self) -> float:
        """Mean over the engines beside this rank."""
        return sum(self._busy_s.values()) / max(len(self._busy_s), 1)

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
        """Wait for the engines beside this rank.

        Raises:
            DeadlineExceeded: an engine did not come up in time.
        """
        self.start()
        self._rank, self._world_size = rank, world_size
        timeout_s = self.config.ready_timeout_s
        started = [self._begin(e, "ready", timeout_s=timeout_s, phase="start-up of the engine") for e in self._beside]
        for wait in started:
            try:
                wait()
            except EngineLost as lost:
                # It has something to say of why it did not start.
                raise (lost.__cause__ or lost) from None
        self._each("begin_session")
        # No rank samples or sends weights before the engines have forgotten the workers of before.
        _barrier()

    # Sampling ---------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample this rank's prompts. Collective."""
        self._check_lost()
        references: dict[Any, int] = {}
        for engine, share in self._shares(len(prompts)).items():
            part = slice(share.start, share.stop)
            seeds_there = None if seeds is None else seeds[part]
            reference = self._actors[engine].generate.remote(
                self._rank, self._ranks_beside(engine), prompts[part], sampling, seeds_there
            )
            references[reference] = engine
        parts: dict[Any, Generations] = {}
        deadline = self._deadline()
        while len(parts) < len(references):
            waiting = {one: engine for one, engine in references.items() if one not in parts}
            reference = self._first(waiting, deadline, "generate")
            parts[reference], self._busy_s[references[reference]] = self._result(references[reference], reference)
        return Generations.concat([parts[reference] for reference in references])

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Have groups sampled. Collective if they begin together."""
        for engine, share in self._shares(len(requests)).items():
            ranks = self._ranks_beside(engine) if together else []
            mine = [requests[place] for place in share]
            self._engine_of |= {one.ticket: engine for one in mine}
            if ranks or mine:
                reference = self._actors[engine].submit.remote(self._rank, ranks, mine, sampling)
                self._submitted[reference] = engine

    def collect(self, required: Sequence[int], count: int) -> dict[int, Generations]:
        """Wait for groups; returns those that are finished."""
        self._check_lost()
        deadline = self._deadline()
        while self._submitted:
            reference = self._first(self._submitted, deadline, "submit")
            self._result(self._submitted.pop(reference), reference)
        if not required and not count:
            self._take_what_is_there(deadline)
        while True:
            missing = [ticket for ticket in required if ticket not in self._finished]
            if not missing and len(self._finished) >= count:
                finished, self._finished = self._finished, {}
                return finished
            self._poll(missing, count - len(self._finished))
            self._take(self._first(self._polls, deadline, "collect"))

    def _poll(self, required: Sequence[int], count: int) -> None:
        """Have every engine tell what is finished as soon as it is what is waited for."""
        asked = set(self._polls.values())
        engines = set(self._engine_of.values())
        for engine in sorted(engines - asked):
            theirs = [ticket for ticket in required if self._engine_of[ticket] == engine]
            if theirs or not required:
                enough = 0 if required else count if len(engines) == 1 else 1
                self._polls[self._actors[engine].collect.remote(self._rank, theirs, enough)] = engine

    def _take_what_is_there(self, deadline: float) -> None:
        import ray

        asked = dict(self._polls)
        if asked:
            for reference in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
                self._take(reference)
        now = {
            self._actors[engine].collect.remote(self._rank, [], 0): engine
            for engine in set(self._engine_of.values()) - set(self._polls.values())
        }
        self._polls |= now
        while left := {reference: engine for reference, engine in now.items() if reference in self._polls}:
            self._take(self._first(left, deadline, "collect"))

    def _take(self, reference: Any) -> None:
        engine = self._polls.pop(reference)
        tickets, generations, self._busy_s[engine] = self._result(engine, reference)
        for ticket, part in zip(tickets, generations.split(len(tickets)) if tickets else (), strict=True):
            # One that was dropped in the meantime is of no use.
            if self._engine_of.pop(ticket, None) is not None:
                self._finished[ticket] = part

    def drop(self, tickets: Sequence[int]) -> None:
        """End groups, and forget them."""
        theirs: dict[int, list[int]] = {}
        for ticket in tickets:
            self._finished.pop(ticket, None)
            if ticket in self._engine_of:
                theirs.setdefault(self._engine_of.pop(ticket), []).append(ticket)
        timeout_s = self.config.update_timeout_s
        waits = [
            self._begin(engine, "drop", self._rank, dropped, timeout_s=timeout_s, phase="drop")
            for engine, dropped in theirs.items()
        ]
        for wait in waits:
            # A lost engine has dropped all it had.
            with suppress(EngineLost):
                wait()

    def _deadline(self) -> float:
        # The actor's own deadline comes first: it knows which rank is missing.
        return time.monotonic() + self.config.generate_timeout_s + 30

    # Lost engines -----------------------------------------------------------------------------------------------

    def lost_tickets(self) -> list[int]:
        """Of groups that were submitted, and went with an engine that was lost; to be submitted again."""
        tickets, self._lost_tickets = self._lost_tickets, []
        return tickets

    def replace_lost(self) -> int:
        """Go on without the engines that any rank has lost; returns how many they are. Collective."""
        import ray

        lost: dict[int, bool] = {}
        for told in _gather(self._lost):
            lost |= {engine: silent or lost.get(engine, False) for engine, silent in told.items()}
        for engine, silent in sorted(lost.items()):
            self._lose(engine, silent=silent)
            self._living.remove(engine)
            if self._rank == 0 and silent:
                ray.kill(self._actors[engine], no_restart=False)
            self._returning[engine] = self._actors[engine].ready.remote() if self._rank == 0 else None
        self._lost.clear()
        self._disconnect()
        return len(lost)

    def _lose(self, engine: int, *, silent: bool) -> EngineLost:
        self._lost[engine] = silent
        self._lost_tickets += [ticket for ticket, holder in self._engine_of.items() if holder == engine]
        for held in (self._engine_of, self._submitted, self._polls):
            for key in [key for key, holder in held.items() if holder == engine]:
                del held[key]
        self._busy_s.pop(engine, None)
        return EngineLost(f"rank {self._rank} has lost vLLM engine {self._label(engine)!r}")

    def _check_lost(self) -> None:
        if self._lost:
            raise EngineLost(f"rank {self._rank} has lost vLLM engines {[self._label(one) for one in self._lost]}")

    def _welcome_back(self) -> None:
        """Those that are up again take their places; where nobody is left, the first is waited for. Collective."""
        back: list[int] = _broadcast(self._back() if self._rank == 0 else [])
        for engine in back:
            del self._returning[engine]
        if back:
            self._living = sorted([*self._living, *back])
            self._disconnect()

    def _back(self) -> list[int]:
        import ray

        deadline = time.monotonic() + (0 if self._living else self.config.ready_timeout_s)
        while True:
            waiting = {reference: engine for engine, reference in self._returning.items()}
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
            back = []
            for reference in ready:
                try:
                    ray.get(reference)
                    back.append(waiting[reference])
                except ray.exceptions.RayActorError:
                    # It met the process that was about to end.
                    self._returning[waiting[reference]] = self._actors[waiting[reference]].ready.remote()
            if back or self._living:
                return back
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"rank 0 waited {self.config.ready_timeout_s:.0f} s for one of the lost vLLM engines "
                    f"{[self._label(engine) for engine in self._returning]} to start again"
                )
            time.sleep(0.2)

    # Weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Send the weights, or the adapter alone, and name their version. Collective.

        Raises:
            ConfigError: the engine was made for an adapter, and the policy has none.
        """
        if self._returning:
            self._welcome_back()
        if self.config.lora_rank:
            self._send_adapter(source, version)
            return
        try:
            if self._send is None:
                self._send = self._make_sender(source)
            self._send(version)
        except ReceiverLost as error:
            raise self._lose(self._living[error.position], silent=error.silent) from error

    def check_weights(self, source: WeightSource) -> None:
        """Compare what is in the engines' memory with the source (CPU; on CUDA only the probe looks). Collective."""
        if self._shared_memory is not None:
            self._shared_memory.check(source, self._checksums)

    def _checksums(self, position: int, runs: list[Run]) -> list[list[int]]:
        engine, timeout_s = self._living[position], self.config.update_timeout_s
        wait = self._begin(engine, "checksums", runs, timeout_s=timeout_s, phase="check of a weight update")
        checksums: list[list[int]] = wait()
        return checksums

    def _send_adapter(self, source: WeightSource, version: int) -> None:
        import ray

        if not isinstance(source, AdaptedWeightSource):
            raise ConfigError("rollout.lora=adapter, and the policy has no adapter: use rollout.lora=merged")
        files = source.adapter_files()
        lost = False
        if self._rank == 0:
            once = ray.put(files)
            timeout_s = self.config.update_timeout_s
            waits = [
                self._begin(engine, "load_adapter", once, version, timeout_s=timeout_s, phase="adapter update")
                for engine in self._living
            ]
            for wait in waits:
                try:
                    wait()
                except EngineLost:
                    lost = True
        if _broadcast(lost):
            raise EngineLost("an engine was lost in an adapter update")

    def _make_sender(self, source: WeightSource) -> Callable[[int], None]:
        if self.config.backend == "shared_memory":
            self._shared_memory = SharedMemorySender(
                source,
                rank=self._rank,
                world_size=self._world_size,
                broadcast=_broadcast,
                engines=[_Receivers(self, engine) for engine in self._living] if self._rank == 0 else [],
                num_engines=len(self._living),
                num_receivers=self.config.tensor_parallel_size,
                keeps_weights=self.keeps_weights,
                timeout_s=self.config.update_timeout_s,
            )
            return self._shared_memory.send
        if self.config.backend == "gloo":
            self._gloo = GlooSender(
                source,
                rank=self._rank,
                share=_broadcast,
                engines=[_Receivers(self, engine) for engine in self._living] if self._rank == 0 else [],
                num_receivers=self.config.tensor_parallel_size,
                bucket_bytes=self.config.bucket_mb * 2**20,
                timeout_s=self.config.update_timeout_s,
            )
            return self._gloo.send
        from rl_plugins.rollout.vllm.cuda_transport import SeveralEngines, make_cuda_sender

        clients = [WeightSyncClient(self, engine) for engine in self._living]
        return make_cuda_sender(
            self.config,
            source,
            client=SeveralEngines(clients, self.config.tensor_parallel_size) if len(clients) > 1 else clients[0],
            rank=self._rank,
            num_engines=len(clients),
        )

    def _disconnect(self) -> None:
        for sender in (self._shared_memory, self._gloo):
            if sender is not None:
                sender.close()
        self._send = self._shared_memory = self._gloo = None

    # Memory and the rest ----------------------------------------------------------------------------------------

    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Of an engine beside this rank."""
        timeout_s = self.config.generate_timeout_s
        log_probs: list[float] = self._call("prompt_log_probs", prompt, timeout_s=timeout_s, phase="prompt_log_probs")
        return log_probs

    def sleep(self) -> MemoryChange | None:
        """Give back what `sleep` of the settings names; the rank that speaks for an engine returns what that did."""
        changes: list[MemoryChange] = self._each("sleep") if self.config.sleeps else []
        return MemoryChange.total(changes) if changes else None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it back; on CPU memory comes back by itself."""
        if self.config.sleeps and self.config.device == "cuda":
            self._each("wake_up", None if tags is None else list(tags))

    def abort(self) -> None:
        """End every unfinished request of the engines."""
        self._each("abort")

    def close(self) -> None:
        """Forget the connection; the actors end with their Ray job."""
        self._disconnect()
        self._actors = []

    def stop(self) -> None:
        """End the actors."""
        import ray

        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self.close()

    # Calls ------------------------------------------------------------------------------------------------------

    @property
    def _beside(self) -> list[int]:
        return [self._living[place] for place in beside(self._rank, self._world_size, len(self._living))]

    def _ranks_beside(self, engine: int) -> list[int]:
        return list(beside(self._living.index(engine), len(self._living), self._world_size))

    def _shares(self, count: int) -> Mapping[int, range]:
        parts = shares(self._rank, self._world_size, len(self._living), count)
        return {self._living[place]: share for place, share in parts.items()}

    def _each(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every engine that this rank speaks for: the first of the ranks beside it does.

        A lost engine answers nothing, and is found to be lost when it is to sample.
        """
        timeout_s = self.config.update_timeout_s
        engines = [engine for engine in self._beside if self._ranks_beside(engine)[0] == self._rank]
        waits = [self._begin(engine, method, *arguments, timeout_s=timeout_s, phase=method) for engine in engines]
        results = []
        for wait in waits:
            try:
                results.append(wait())
            except EngineLost:
                continue
        return results

    def _call(self, method: str, *arguments: Any, timeout_s: float, phase: str) -> Any:
        return self._begin(self._beside[0], method, *arguments, timeout_s=timeout_s, phase=phase)()

    def _begin(self, engine: int, method: str, *arguments: Any, timeout_s: float, phase: str) -> Callable[[], Any]:
        import ray

        reference = getattr(self._actors[engine], method).remote(*arguments)

        def wait() -> Any:
            try:
                return self._result(engine, reference, timeout_s)
            except ray.exceptions.GetTimeoutError:
                raise self._late(timeout_s, engine, phase) from None

        return wait

    def _first(self, waiting: Mapping[Any, int], deadline: float, phase: str) -> Any:
        """The first call that is answered; while none is, the engines must say that they live."""
        import ray

        while True:
            left = deadline - time.monotonic()
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, min(self.config.stall_timeout_s, left)))
            if ready:
                return ready[0]
            engines = sorted(set(waiting.values()))
            if left <= 0:
                raise self._late(self.config.generate_timeout_s + 30, engines[0], phase)
            for engine in engines:
                try:
                    self._result(engine, self._actors[engine].progress.remote(), self.config.stall_timeout_s)
                except ray.exceptions.GetTimeoutError:
                    raise self._lose(engine, silent=True) from None

    def _result(self, engine: int, reference: Any, timeout_s: float | None = None) -> Any:
        import ray

        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.RayActorError as error:
            raise self._lose(engine, silent=False) from error

    def _late(self, seconds: float, engine: int, phase: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"rank {self._rank} waited {seconds:.0f} s for vLLM engine {self._label(engine)!r} in phase {phase!r}"
        )

    def _label(self, engine: int) -> str:
        return f"{self.name}-{engine}"


class WeightSyncClient:
    """vLLM's `VLLMWeightSyncClient` protocol over the actor, with deadlines."""

    def __init__(self, rollout: VLLMRollout, engine: int) -> None:
        self._rollout, self._engine = rollout, engine

    def _call(self, method: str, *arguments: Any) -> None:
        timeout_s, phase = self._rollout.config.update_timeout_s, f"weight update ({method})"
        self._rollout._begin(self._engine, method, *arguments, timeout_s=timeout_s, phase=phase)()

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


class _Receivers:
    """What rank 0 asks of an actor in an update that the processes of its engine take in one call."""

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


def _gather(value: Any) -> list[Any]:
    import torch

    if not _distributed():
        return [value]
    everyones: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, value)
    return everyones


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
