"""The engines' actors: the list of living engines, the engines of each rank, and calls with deadlines.

A lost engine leaves the list of living engines, and the remaining engines take over its work. Ray restarts the engine.
If the engine shared the workers' GPUs, the workers start another one. The next weight update adds the engine to the
list again.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl_plugins.config.rollout import ENGINE_GRACE_S
from rl_plugins.errors import ConfigError, DeadlineExceeded, EngineLost, user_errors_of_tasks
from rl_plugins.ranks import Ranks, barrier, broadcast, gather
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.gpu_binding import engine_places, gpu_of_this_rank, lacking_room

logger = logging.getLogger(__name__)


def assigned_range(index: int, size: int, other_size: int) -> range:
    """Return the indices in a second list that are assigned to an index of a first list.

    Both lists are stretched to the same length. An index gets all overlapping indices, so the assignment is symmetric.

    Args:
        index: index in the first list (for example a rank).
        size: length of the first list.
        other_size: length of the second list (for example the number of engines).
    """
    return range(index * other_size // size, -(-(index + 1) * other_size // size))


def split_prompts(rank: int, ranks: int, engines: int, count: int) -> dict[int, range]:
    """Return the range of a rank's `count` prompts for each engine of the rank. Engines get nearly equal loads."""
    parts = {engine: range(0) for engine in assigned_range(rank, ranks, engines)}
    for prompt in range(count):
        # Position of the middle of the prompt among the prompts of all ranks, in halves of a prompt.
        engine = (2 * (rank * count + prompt) + 1) * engines // (2 * count * ranks)
        parts[engine] = range(parts[engine].start if parts[engine] else prompt, prompt + 1)
    return parts


def _do_nothing(engine: int) -> None:
    pass


class Deadline:
    """A deadline that starts now.

    Args:
        seconds: time until the deadline, in seconds.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after the deadline."""
        return self._end - time.monotonic()


class Fleet:
    """All engines of a run.

    Args:
        config: settings of each engine.
        name: prefix of the actors' names.
        size: number of engines; unused if the engines share the GPUs of the ranks.
        num_gpus: number of GPUs that each actor reserves in Ray.

    Attributes:
        actors: Ray's handle of each started actor by the index of the engine.
        living: indices of the engines with current weights, equal on all ranks.
        returning: restarting engines, equal on all ranks; on rank 0 with Ray's reference of the pending call.
        on_lost: function called with the index of an engine after the loss of the engine.
    """

    def __init__(self, config: VLLMConfig, name: str, size: int, num_gpus: float) -> None:
        self.config, self._name, self._num_gpus = config, name, num_gpus
        self.actors: dict[int, Any] = {}
        self.rank, self.world_size = 0, 1
        self.living = [] if config.shares_gpus else list(range(size))
        self._labels = {engine: f"{name}-{engine}" for engine in self.living}
        self.returning: dict[int, Any] = {}
        self._started = False
        self.on_lost: Callable[[int], None] = _do_nothing
        # Engines lost by this rank since the last collective call; True for an engine without an answer.
        self._lost: dict[int, bool] = {}
        # Engines that have sampled since their start: for this rank, and until the last weight update for any rank.
        self._warm: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Drop the handles: a copy in another process finds the actors by name."""
        return {**self.__dict__, "actors": {}, "on_lost": _do_nothing}

    def start(self, places: Sequence[Mapping[str, Any]] = ()) -> None:
        """Start the actors, or find running actors of the same name, without waiting.

        Args:
            places: Ray's options (place and resources) of each actor. By default each actor reserves `num_gpus`.

        Raises:
            ConfigError: vLLM on CPU cannot sample the model, updates do not reach all weights, or config.json is
                damaged.
        """
        if not self.actors:
            self.config.check_model()
            anywhere = {"num_cpus": 0, "num_gpus": self._num_gpus}
            self._start_actors(self.living, places or [anywhere] * len(self.living))

    def start_on_gpus_of(self, ranks: Ranks) -> None:
        """Start an engine on the GPUs of every `tensor_parallel_size` ranks, or only the lost engines. Collective.

        vLLM measures the free memory of a GPU during its start. Therefore the ranks must not use their GPUs meanwhile.
        Rank 0 owns the actors: the engines end with the training workers.

        Raises:
            ConfigError: see `engine_places`; an engine does not fit into the free memory of a GPU, or updates do not
                reach all weights.
            RuntimeError: an engine that was lost does not fit into the free memory of its GPU.
            DeadlineExceeded: an engine did not start before the deadline.
        """
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.config.check_model()
        size = self.config.tensor_parallel_size
        needs_room = self.rank // size not in self.living
        gpus = ranks.gather(gpu_of_this_rank(self.config if needs_room else None))
        places = engine_places(gpus, size)
        lost = [engine for engine in range(len(places)) if engine not in self.living]
        if reason := lacking_room({rank: gpu for rank, gpu in enumerate(gpus) if rank // size in lost}, self.config):
            # New training workers start their engines before they use their GPUs, so a restart helps after a loss.
            raise RuntimeError(reason) if self._started else ConfigError(reason)
        # Ray keeps the name of an ended actor for some time.
        start = broadcast(uuid.uuid4().hex[:8])
        self._labels |= {engine: f"{self._name}-{engine}-{start}" for engine in lost}
        self.living = list(range(len(places)))
        if self.rank == 0:
            self._start_actors(lost, places)
        barrier()
        if self.rank != 0:
            self._start_actors(lost, places)
        self.wait_until_ready()
        # A new engine takes no work before its session has begun. The living engines keep their work.
        self.each("begin_session", among=lost)
        self._started = True
        barrier()

    def _start_actors(self, engines: Iterable[int], places: Sequence[Mapping[str, Any]]) -> None:
        import ray

        from rl_plugins.rollout.vllm.actor import VLLMActor

        for engine in engines:
            place = dict(places[engine])
            environment = {**self.config.environment, **place.pop("environment", {})}
            # A restart of an engine on a GPU in use would fail. `start_on_gpus_of` starts such an engine again.
            restarts = 0 if self.config.shares_gpus else -1
            self.actors[engine] = (
                ray.remote(VLLMActor)
                .options(
                    name=self.label(engine),
                    get_if_exists=True,
                    max_restarts=restarts,
                    max_concurrency=1000,
                    runtime_env={"env_vars": environment},
                    **place,
                )
                .remote(self.config)
            )

    def wait_until_ready(self) -> None:
        """Wait for the engines of this rank.

        Raises:
            DeadlineExceeded: an engine did not start before the deadline.
        """
        timeout_s = self.config.ready_timeout_s
        # An engine does not answer `progress` while it starts.
        started = [
            self.begin(engine, "ready", timeout_s=timeout_s, phase="start-up of the engine", must_answer=False)
            for engine in self.engines_of_rank
        ]
        for wait in started:
            try:
                wait()
            except EngineLost as lost:
                # The cause explains why the engine did not start.
                raise (lost.__cause__ or lost) from None

    def stop(self) -> None:
        """End the actors."""
        import ray

        for actor in self.actors.values():
            ray.kill(actor, no_restart=True)

    def leave(self) -> None:
        """Release the actors. Engines on the GPUs of the ranks end, and `start_on_gpus_of` starts new engines.

        The next session waits for the engines that start again.
        """
        if self.config.shares_gpus:
            if self.rank == 0:
                self.stop()
            self.living, self.returning, self._started = [], {}, False
            self._warm.clear()
        elif self.returning:
            if self.rank == 0:
                self._ready_again()
            self.living, self.returning = sorted([*self.living, *self.returning]), {}
        self.actors = {}

    def label(self, engine: int) -> str:
        """Return the name of an engine's actor."""
        return self._labels[engine]

    # Assignment of engines to ranks -----------------------------------------------------------------------------

    @property
    def engines_of_rank(self) -> list[int]:
        """Indices of the living engines of this rank."""
        return [self.living[place] for place in assigned_range(self.rank, self.world_size, len(self.living))]

    def ranks_of_engine(self, engine: int) -> list[int]:
        """Return the ranks of a living engine."""
        return list(assigned_range(self.living.index(engine), len(self.living), self.world_size))

    def shares(self, count: int) -> Mapping[int, range]:
        """Return the range of this rank's `count` prompts for each engine of the rank."""
        parts = split_prompts(self.rank, self.world_size, len(self.living), count)
        return {self.living[place]: share for place, share in parts.items()}

    # Calls ------------------------------------------------------------------------------------------------------

    def each(self, method: str, *arguments: Any, among: Collection[int] | None = None) -> list[Any]:
        """Call a method once per engine: the first rank of an engine makes the call.

        Lost engines are skipped. The next sampling handles an engine lost during the call.

        Args:
            method: name of the actor's method.
            *arguments: arguments of the method.
            among: engines to call; by default all engines.
        """
        timeout_s = self.config.update_timeout_s
        callable_engines = [engine for engine in self.engines_of_rank if self.ranks_of_engine(engine)[0] == self.rank]
        # A call of a dead actor takes Ray seconds to fail.
        engines = [
            engine for engine in callable_engines if engine not in self._lost and (among is None or engine in among)
        ]
        waits = [self.begin(engine, method, *arguments, timeout_s=timeout_s, phase=method) for engine in engines]
        results = []
        for wait in waits:
            try:
                results.append(wait())
            except EngineLost:
                continue
        return results

    def begin(
        self, engine: int, method: str, *arguments: Any, timeout_s: float, phase: str, must_answer: bool = True
    ) -> Callable[[], Any]:
        """Call a method of an engine. Return a function that waits for the result.

        Args:
            engine: index of the engine.
            method: name of the actor's method.
            *arguments: arguments of the method.
            timeout_s: deadline for the result after the call, in seconds.
            phase: phase of the step, for messages.
            must_answer: True if the engine must answer `progress` while it works, within `stall_timeout_s`, or before
                its first samples within `first_stall_timeout_s`.

        Raises:
            DeadlineExceeded: in the wait, after the deadline. The message names the rank, the engine and the phase.
            EngineLost: in the wait, if the engine is lost.
        """
        reference, deadline = getattr(self.actors[engine], method).remote(*arguments), Deadline(timeout_s)

        def wait() -> Any:
            self.first({reference: engine}, phase, deadline, must_answer=must_answer)
            return self.result(engine, reference)

        return wait

    def first(self, waiting: Mapping[Any, int], phase: str, deadline: Deadline, *, must_answer: bool = True) -> Any:
        """Return the first finished call. During the wait, ask regularly whether the engines answer.

        Args:
            waiting: engine of each pending call, by Ray's reference of the call.
            phase: phase of the step, for messages.
            deadline: deadline of all calls.
            must_answer: see `begin`.

        Raises:
            DeadlineExceeded: no call finished before the deadline.
            EngineLost: an engine did not answer.
        """
        import ray

        while True:
            left = deadline.left_s
            turn = min(left, *map(self.stall_timeout_s, waiting.values())) if must_answer else left
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, turn))
            if ready:
                return ready[0]
            engines = sorted(set(waiting.values()))
            if left <= 0:
                raise DeadlineExceeded(
                    f"rank {self.rank} waited {deadline.seconds:.0f} s for vLLM engine {self.label(engines[0])!r} "
                    f"in phase {phase!r}"
                )
            for engine in engines if must_answer else ():
                self.check_answers(engine)

    def check_answers(self, engine: int) -> None:
        """Wait for an answer of an engine.

        Raises:
            EngineLost: the engine did not answer within `stall_timeout_s`, or its process has ended.
        """
        import ray

        try:
            self.result(engine, self.actors[engine].progress.remote(), self.stall_timeout_s(engine))
        except ray.exceptions.GetTimeoutError:
            raise self.mark_lost(engine, silent=True) from None

    def result(self, engine: int, reference: Any, timeout_s: float | None = None) -> Any:
        """Return the result of a call.

        Raises:
            EngineLost: the process of the engine has ended.
            UserError: the engine raised the error.
        """
        import ray

        try:
            # A wrong option needs one line.
            with user_errors_of_tasks():
                return ray.get(reference, timeout=timeout_s)
        # A restarted process raises EngineLost if the rank has not noticed the restart.
        except (ray.exceptions.RayActorError, EngineLost) as error:
            raise self.mark_lost(engine, silent=False, cause=error) from error

    def mark_warm(self, engine: int) -> None:
        """Note that an engine has finished samples for this rank, so its kernels are compiled."""
        self._warm.add(engine)

    def share_warm_engines(self) -> None:
        """Tell all ranks which engines have sampled: a rank also calls the engines of other ranks. Collective."""
        self._warm = set().union(*gather(self._warm))

    def stall_timeout_s(self, engine: int) -> float:
        """Return the longest time without an answer of an engine, in seconds."""
        return self.config.stall_timeout_s if engine in self._warm else self.config.first_stall_timeout_s

    def sampling_deadline(self) -> Deadline:
        """Return the deadline of sampling. The actor's deadline ends first and names the missing ranks."""
        return Deadline(self.config.generate_timeout_s + ENGINE_GRACE_S)

    # Lost engines -----------------------------------------------------------------------------------------------

    def mark_lost(self, engine: int, *, silent: bool, cause: Exception | None = None) -> EngineLost:
        """Record and log the loss of an engine on this rank, with its cause; return the error to raise."""
        if engine not in self._lost:
            reason = next(iter(str(cause or "").splitlines()), "its process has ended")
            if silent and cause is None:
                reason = f"no answer for {self.stall_timeout_s(engine):g} s"
            logger.warning("rank %d has lost vLLM engine %s: %s", self.rank, self.label(engine), reason)
        self._lost[engine] = silent
        self.on_lost(engine)
        return EngineLost(f"rank {self.rank} has lost vLLM engine {self.label(engine)!r}")

    def check_lost(self) -> None:
        """Raise if this rank has lost an engine since the last `drop_lost`.

        Raises:
            EngineLost: this rank has lost an engine.
        """
        if self._lost:
            raise EngineLost(f"rank {self.rank} has lost vLLM engines {[self.label(engine) for engine in self._lost]}")

    def find_lost(self) -> None:
        """Check all living engines at once for an answer.

        Raises:
            EngineLost: an engine did not answer within `stall_timeout_s`.
        """
        import ray

        asked = {self.actors[engine].progress.remote(): engine for engine in self.living}
        answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=self.config.stall_timeout_s)
        for reference, engine in asked.items():
            if reference not in answers:
                self.mark_lost(engine, silent=True)
                continue
            with suppress(EngineLost):
                self.result(engine, reference)
        self.check_lost()

    def drop_lost(self) -> int:
        """Remove the engines lost by any rank from `living`; return the number of lost engines. Collective."""
        import ray

        lost: dict[int, bool] = {}
        for lost_by_rank in gather(self._lost):
            lost |= {engine: silent or lost.get(engine, False) for engine, silent in lost_by_rank.items()}
        for engine, silent in sorted(lost.items()):
            self.on_lost(engine)
            self.living.remove(engine)
            self._warm.discard(engine)
            # Ray also gives up engines that still live, which would keep the memory of the GPUs of their successors.
            if self.rank == 0 and (silent or self.config.shares_gpus):
                ray.kill(self.actors[engine], no_restart=self.config.shares_gpus)
            if self.config.shares_gpus:
                continue
            self.returning[engine] = self.actors[engine].begin_session.remote() if self.rank == 0 else None
        self._lost.clear()
        return len(lost)

    def add_restarted(self) -> bool:
        """Add restarted engines to `living`. Without a living engine, wait for the first. Collective.

        Returns:
            True if an engine was added.

        Raises:
            DeadlineExceeded: there is no living engine, and no engine restarted before the deadline.
        """
        back: list[int] = broadcast(self._restarted() if self.rank == 0 else [])
        for engine in back:
            del self.returning[engine]
        self.living = sorted([*self.living, *back])
        return bool(back)

    def _restarted(self) -> list[int]:
        deadline = time.monotonic() + self.config.ready_timeout_s
        while True:
            back = self._ready_again()
            if back or self.living:
                return back
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"rank 0 waited {self.config.ready_timeout_s:.0f} s for one of the lost vLLM engines "
                    f"{[self.label(engine) for engine in self.returning]} to start again"
                )
            time.sleep(0.2)

    def _ready_again(self) -> list[int]:
        """Return the restarted engines whose session has begun. Engines whose restart vLLM has refused start anew."""
        import ray

        waiting = {reference: engine for engine, reference in self.returning.items()}
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        back = []
        for reference in ready:
            engine = waiting[reference]
            try:
                with user_errors_of_tasks():
                    ray.get(reference)
                back.append(engine)
                continue
            except ConfigError as refusal:
                # The first start had the same settings. Memory of the lost process may have been in use.
                logger.warning("vLLM engine %s does not start again yet: %s", self.label(engine), refusal)
                ray.kill(self.actors[engine], no_restart=False)
            except ray.exceptions.RayActorError:
                # The call reached the old process just before its end.
                pass
            self.returning[engine] = self.actors[engine].begin_session.remote()
        return back
