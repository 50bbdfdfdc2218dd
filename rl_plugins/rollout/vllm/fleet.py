"""The engines' actors as a training rank sees them: who lives, who works with whom, and calls with deadlines.

Engines that are lost leave the row of those that work (`row.py`), and come back to it with a weight update when Ray has
started them again; until then the others do their work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl_plugins.errors import DeadlineExceeded, EngineLost
from rl_plugins.ranks import broadcast, gather
from rl_plugins.rollout.vllm.config import VLLMConfig


def assigned_range(place: int, here: int, there: int) -> range:
    """The places of the other row that lie beside one of this row.

    Args:
        place: in this row.
        here: places of this row.
        there: places of the other row.
    """
    return range(place * there // here, -(-(place + 1) * there // here))


def split_prompts(rank: int, ranks: int, engines: int, count: int) -> dict[int, range]:
    """Which of `count` prompts of a rank go to each engine beside it, so that all engines get about as many."""
    parts = {engine: range(0) for engine in assigned_range(rank, ranks, engines)}
    for prompt in range(count):
        # Where the middle of the prompt lies, counted in halves of a prompt over the row of all ranks.
        engine = (2 * (rank * count + prompt) + 1) * engines // (2 * count * ranks)
        parts[engine] = range(parts[engine].start if parts[engine] else prompt, prompt + 1)
    return parts


class Patience:
    """A deadline.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until it."""
        return self._end - time.monotonic()


class Fleet:
    """All engines of a run.

    Args:
        config: the settings of each engine.
        name: of the actors.
        size: how many engines there are.
        num_gpus: Ray's share of GPUs for each actor.

    Attributes:
        actors: Ray's handles, once they are started.
        living: numbers of the engines that have the weights; the same on every rank.
        returning: those on the way back; the same on every rank.
        on_lost: told the number of an engine that this rank has lost, or has heard to be lost.
    """

    def __init__(self, config: VLLMConfig, name: str, size: int, num_gpus: float) -> None:
        self.config, self._name, self._num_gpus = config, name, num_gpus
        self.actors: list[Any] = []
        self.rank, self.world_size = 0, 1
        self.living = list(range(size))
        self.returning: dict[int, Any] = {}
        self.on_lost: Callable[[int], None] | None = None
        # Those that this rank has lost and the others may not know of yet, and whether they were only silent.
        self._lost: dict[int, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process looks the actors up by name."""
        return {**self.__dict__, "actors": [], "on_lost": None}

    def start(self, places: Sequence[Mapping[str, Any]] = ()) -> None:
        """Start the actors, or find those of this name; does not wait for them.

        Args:
            places: Ray's options of each actor: where it runs, and what it takes; by default its share of GPUs.
        """
        import ray

        from rl_plugins.rollout.vllm.actor import VLLMActor

        if not self.actors:
            anywhere = {"num_cpus": 0, "num_gpus": self._num_gpus}
            self.actors = [
                ray.remote(VLLMActor)
                .options(
                    name=self.label(number),
                    get_if_exists=True,
                    max_restarts=-1,
                    max_concurrency=1000,
                    runtime_env={"env_vars": self.config.environment},
                    **(places[number] if places else anywhere),
                )
                .remote(self.config)
                for number in self.living
            ]

    def wait_until_ready(self) -> None:
        """Wait for the engines beside this rank.

        Raises:
            DeadlineExceeded: one did not come up in time.
        """
        timeout_s = self.config.ready_timeout_s
        # An engine that starts answers nothing.
        started = [
            self.begin(engine, "ready", timeout_s=timeout_s, phase="start-up of the engine", must_answer=False)
            for engine in self.engines_of_rank
        ]
        for wait in started:
            try:
                wait()
            except EngineLost as lost:
                # It has something to say of why it did not start.
                raise (lost.__cause__ or lost) from None

    def stop(self) -> None:
        """End the actors."""
        import ray

        for actor in self.actors:
            ray.kill(actor, no_restart=True)

    def label(self, engine: int) -> str:
        """Name of an engine's actor."""
        return f"{self._name}-{engine}"

    # Who works with whom ----------------------------------------------------------------------------------------

    @property
    def engines_of_rank(self) -> list[int]:
        """The living engines beside this rank."""
        return [self.living[place] for place in assigned_range(self.rank, self.world_size, len(self.living))]

    def ranks_of_engine(self, engine: int) -> list[int]:
        """The ranks beside a living engine."""
        return list(assigned_range(self.living.index(engine), len(self.living), self.world_size))

    def shares(self, count: int) -> Mapping[int, range]:
        """Which of so many prompts of this rank go to each engine beside it."""
        parts = split_prompts(self.rank, self.world_size, len(self.living), count)
        return {self.living[place]: share for place, share in parts.items()}

    # Calls ------------------------------------------------------------------------------------------------------

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every engine that this rank speaks for: the first of the ranks beside it does.

        A lost engine is not asked, and one that is lost now is found to be so when it is to sample.
        """
        timeout_s = self.config.update_timeout_s
        spoken_for = [engine for engine in self.engines_of_rank if self.ranks_of_engine(engine)[0] == self.rank]
        # Ray takes seconds to say of a call that its actor is no more.
        engines = [engine for engine in spoken_for if engine not in self._lost]
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
        """Call a method of an engine; what is returned waits for its result.

        Args:
            engine: its number.
            method: of the actor.
            *arguments: of the method.
            timeout_s: deadline for the result, from the call on.
            phase: of the step, for messages.
            must_answer: an engine that does not answer between two steps is lost before that.

        Raises:
            DeadlineExceeded: when waiting, names the rank, the engine and the phase.
            EngineLost: when waiting.
        """
        reference, patience = getattr(self.actors[engine], method).remote(*arguments), Patience(timeout_s)

        def wait() -> Any:
            self.first({reference: engine}, phase, patience, must_answer=must_answer)
            return self.result(engine, reference)

        return wait

    def first(self, waiting: Mapping[Any, int], phase: str, patience: Patience, *, must_answer: bool = True) -> Any:
        """The first of some calls that is answered; while none is, their engines must say that they live.

        Args:
            waiting: reference of a call to its engine.
            phase: of the step, for messages.
            patience: for all of them.
            must_answer: see `begin`.

        Raises:
            DeadlineExceeded: none was answered in time.
            EngineLost: an engine did not say so.
        """
        import ray

        while True:
            left = patience.left_s
            turn = min(self.config.stall_timeout_s, left) if must_answer else left
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, turn))
            if ready:
                return ready[0]
            engines = sorted(set(waiting.values()))
            if left <= 0:
                raise DeadlineExceeded(
                    f"rank {self.rank} waited {patience.seconds:.0f} s for vLLM engine {self.label(engines[0])!r} "
                    f"in phase {phase!r}"
                )
            for engine in engines if must_answer else ():
                try:
                    self.result(engine, self.actors[engine].progress.remote(), self.config.stall_timeout_s)
                except ray.exceptions.GetTimeoutError:
                    raise self.mark_lost(engine, silent=True) from None

    def result(self, engine: int, reference: Any, timeout_s: float | None = None) -> Any:
        """What a call of an engine has given.

        Raises:
            EngineLost: its process has ended.
        """
        import ray

        try:
            return ray.get(reference, timeout=timeout_s)
        # A process that Ray has started in the place of one that nobody missed says so itself.
        except (ray.exceptions.RayActorError, EngineLost) as error:
            raise self.mark_lost(engine, silent=False) from error

    def patience(self) -> Patience:
        """For sampling that begins now. The actor's own comes to its end first: it knows which rank is missing."""
        return Patience(self.config.generate_timeout_s + 30)

    # Lost engines -----------------------------------------------------------------------------------------------

    def mark_lost(self, engine: int, *, silent: bool) -> EngineLost:
        """Note that this rank has lost an engine; returns the error to raise."""
        self._lost[engine] = silent
        if self.on_lost is not None:
            self.on_lost(engine)
        return EngineLost(f"rank {self.rank} has lost vLLM engine {self.label(engine)!r}")

    def check_lost(self) -> None:
        """Raise if this rank has lost an engine that not all know of.

        Raises:
            EngineLost: it has.
        """
        if self._lost:
            raise EngineLost(f"rank {self.rank} has lost vLLM engines {[self.label(one) for one in self._lost]}")

    def find_lost(self) -> None:
        """Have all living engines say that they live, at once.

        Raises:
            EngineLost: one has not, for as long as it may take between two steps.
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

    def leave_lost(self) -> int:
        """Go on without the engines that any rank has lost; returns how many they are. Collective."""
        import ray

        lost: dict[int, bool] = {}
        for told in gather(self._lost):
            lost |= {engine: silent or lost.get(engine, False) for engine, silent in told.items()}
        for engine, silent in sorted(lost.items()):
            self.mark_lost(engine, silent=silent)
            self.living.remove(engine)
            if self.rank == 0 and silent:
                ray.kill(self.actors[engine], no_restart=False)
            self.returning[engine] = self.actors[engine].begin_session.remote() if self.rank == 0 else None
        self._lost.clear()
        return len(lost)

    def welcome_back(self) -> bool:
        """Those that are up again take their places; where nobody is left, the first is waited for. Collective.

        Returns:
            Whether any came.

        Raises:
            DeadlineExceeded: nobody is left, and none came.
        """
        back: list[int] = broadcast(self._back() if self.rank == 0 else [])
        for engine in back:
            del self.returning[engine]
        self.living = sorted([*self.living, *back])
        return bool(back)

    def _back(self) -> list[int]:
        import ray

        deadline = time.monotonic() + self.config.ready_timeout_s
        while True:
            waiting = {reference: engine for engine, reference in self.returning.items()}
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
            back = []
            for reference in ready:
                try:
                    ray.get(reference)
                    back.append(waiting[reference])
                except ray.exceptions.RayActorError:
                    # It met the process that was about to end.
                    self.returning[waiting[reference]] = self.actors[waiting[reference]].begin_session.remote()
            if back or self.living:
                return back
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"rank 0 waited {self.config.ready_timeout_s:.0f} s for one of the lost vLLM engines "
                    f"{[self.label(engine) for engine in self.returning]} to start again"
                )
            time.sleep(0.2)
