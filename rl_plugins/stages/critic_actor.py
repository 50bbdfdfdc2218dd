"""A process that holds the critic: a Ray actor, alone or with others that hold the same one.

Training ranks hand in their rows of a mini-batch, and when those of all ranks are there, the update begins, the same in
every process. The event loop answers meanwhile; the work is done in one thread, in the order in which it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rl_plugins.models.pool_actor import Arrays, PoolConfig, process_name

if TYPE_CHECKING:
    from rl_plugins.algorithms.aggregation import GlobalCounts
    from rl_plugins.data.experience import Experience
    from rl_plugins.stages.critic_learner import CriticLearner, CriticTraining, Learnt

T = TypeVar("T")


def start_critic(config: PoolConfig, training: CriticTraining, options: Sequence[dict[str, Any]]) -> list[Any]:
    """Start the processes of a critic; does not wait for them. They end with their handles, or with this process.

    None is started again by Ray: the new one would not have learnt what the others have.

    Args:
        config: the pool.
        training: what it does.
        options: Ray's for each actor: where it runs, and what it takes.
    """
    import ray

    actors: list[Any] = []
    for number, own in enumerate(options):
        # Calls wait inside for those of other ranks, so as many as come must get in.
        actor = ray.remote(CriticActor).options(name=config.label(number), max_concurrency=10**6, **own)
        actors.append(actor.remote(config, training, number, actors[0] if actors else None))
    return actors


@dataclass
class _MiniBatch:
    """Rows that ranks have handed in, and the update that follows when all have."""

    counts: GlobalCounts
    last: bool
    parts: dict[int, Experience] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    update: asyncio.Future[Learnt] | None = None


class CriticActor:
    """Holds the critic.

    Args:
        config: the pool.
        training: what it does.
        number: of this actor in the pool.
        first: handle of the first actor; None is that one.
    """

    def __init__(self, config: PoolConfig, training: CriticTraining, number: int, first: Any = None) -> None:
        self._config, self._number = config, number
        self._mini_batches: dict[int, _MiniBatch] = {}
        self._due = 0
        self._work = ThreadPoolExecutor(max_workers=1)
        self._store = _store(_own_address(), 0, config) if first is None and config.actors > 1 else None
        self._learner = self._work.submit(self._start, training, first)

    def _start(self, training: CriticTraining, first: Any) -> CriticLearner:
        import torch

        from rl_plugins.stages.critic_learner import CriticLearner

        config = self._config
        torch.set_num_threads(config.threads)
        if config.actors > 1:
            torch.distributed.init_process_group(
                "nccl" if config.device == "cuda" else "gloo",
                store=self._store or _store(*self._address_of(first), config),
                rank=self._number,
                world_size=config.actors,
                timeout=timedelta(seconds=config.call_timeout_s),
            )
        return CriticLearner(training, config.device)

    def _address_of(self, first: Any) -> tuple[str, int]:
        import ray

        host, port = ray.get(first.address.remote(), timeout=self._config.ready_timeout_s)
        return host, port

    async def address(self) -> tuple[str, int]:
        """Where the others meet this one, the first."""
        assert self._store is not None
        return _own_address(), self._store.port

    async def ready(self) -> str:
        """The critic is loaded; returns which process has it."""
        await asyncio.wrap_future(self._learner)
        return process_name()

    async def scores(self, rows: Arrays, options: dict[str, Any]) -> tuple[str, Arrays]:
        """`position_scores` of some rows."""

        def run(learner: CriticLearner) -> Arrays:
            import torch

            # Copied: what Ray hands over is read-only.
            tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in rows.items()}
            return {"scores": learner.scores(tensors, **options).numpy()}

        return process_name(), await self._run(run)

    async def learn(
        self, number: int, rank: int, ranks: int, part: Experience, counts: GlobalCounts, last: bool
    ) -> Learnt:
        """Hand in a rank's rows of a mini-batch; returns when the update is done.

        Args:
            number: of the update; they follow each other from 0.
            rank: whose rows these are.
            ranks: how many hand in theirs.
            part: the rows.
            counts: see `CriticLearner.update`.
            last: see `CriticLearner.update`.
        """
        mini_batch = self._mini_batches.setdefault(number, _MiniBatch(counts, last))
        mini_batch.parts[rank] = part
        # Calls of an actor like this come in any order, so one may be complete before the one that is due.
        while (due := self._mini_batches.get(self._due)) and len(due.parts) == ranks:
            del self._mini_batches[self._due]
            self._due += 1
            self._begin(due, [due.parts[rank] for rank in range(ranks)])
        await mini_batch.complete.wait()
        assert mini_batch.update is not None
        return await mini_batch.update

    def _begin(self, mini_batch: _MiniBatch, parts: list[Experience]) -> None:
        mini_batch.update = self._run(lambda learner: learner.update(parts, mini_batch.counts, last=mini_batch.last))
        mini_batch.complete.set()

    async def save(self, folder: Path) -> None:
        """Write the critic to a folder."""
        await self._run(lambda learner: learner.save(folder))

    async def load(self, folder: Path) -> None:
        """Read it from there."""
        await self._run(lambda learner: learner.load(folder))

    def _run(self, work: Callable[[CriticLearner], T]) -> asyncio.Future[T]:
        # The thread that made the learner has it when it comes to this.
        return asyncio.get_running_loop().run_in_executor(self._work, lambda: work(self._learner.result()))


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _store(host: str, port: int, config: PoolConfig) -> Any:
    """Where the processes of the group find each other; without a port, the one that the others come to."""
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=config.ready_timeout_s)
    return TCPStore(host, port, is_master=not port, wait_for_workers=False, timeout=timeout)
