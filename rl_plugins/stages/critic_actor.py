"""Ray actor with a critic, alone or together with other actors with the same critic.

Training ranks submit rows of a mini-batch. The update begins when the rows of all ranks have arrived, in the same
order of updates in every actor. The event loop answers calls during an update. One thread does the work, first in,
first out.
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
    """Start the actors of a critic without waiting. Actors end with their handles, or with this process.

    Ray does not restart a failed actor, because a new actor would lack the updates of the other actors.

    Args:
        config: settings of the pool.
        training: model and settings of the critic's training.
        options: Ray options of each actor: placement and resources.
    """
    import ray

    actors: list[Any] = []
    for number, actor_options in enumerate(options):
        # A call waits inside the actor for calls of other ranks, so the actor must accept any number of calls.
        actor = ray.remote(CriticActor).options(name=config.label(number), max_concurrency=10**6, **actor_options)
        actors.append(actor.remote(config, training, number, actors[0] if actors else None))
    return actors


@dataclass
class _MiniBatch:
    """Submitted rows of ranks, and the update, which starts with the rows of the last rank."""

    counts: GlobalCounts
    last: bool
    parts: dict[int, Experience] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    update: asyncio.Future[Learnt] | None = None


class CriticActor:
    """Actor with the critic.

    Args:
        config: settings of the pool.
        training: model and settings of the critic's training.
        number: index of this actor in the pool.
        first: handle of the first actor; None in the first actor itself.
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
        if config.device == "cuda":
            # TF32 for products of float32 numbers.
            torch.set_float32_matmul_precision("high")
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
        """Return host and port of the process group's store, which the first actor runs."""
        assert self._store is not None
        return _own_address(), self._store.port

    async def ready(self) -> str:
        """Wait until the critic is loaded, and return the name of the process."""
        await asyncio.wrap_future(self._learner)
        return process_name()

    async def scores(self, rows: Arrays, options: dict[str, Any]) -> tuple[str, Arrays]:
        """Return the name of the process, and `position_scores` of `rows`."""

        def run(learner: CriticLearner) -> Arrays:
            import torch

            # `torch.tensor` copies, because arrays from Ray are read-only.
            tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in rows.items()}
            return {"scores": learner.scores(tensors, **options).numpy()}

        return process_name(), await self._run(run)

    async def learn(
        self, number: int, rank: int, ranks: int, part: Experience, counts: GlobalCounts, last: bool
    ) -> Learnt:
        """Submit a rank's rows of a mini-batch, and return when the update is done.

        Args:
            number: index of the update, counted from 0.
            rank: rank of the rows.
            ranks: number of ranks.
            part: rows of the rank.
            counts: see `CriticLearner.update`.
            last: see `CriticLearner.update`.
        """
        mini_batch = self._mini_batches.setdefault(number, _MiniBatch(counts, last))
        mini_batch.parts[rank] = part
        # Calls arrive in any order, so a later mini-batch may be complete before the next one in the order of updates.
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
        """Read the critic from a folder."""
        await self._run(lambda learner: learner.load(folder))

    def _run(self, work: Callable[[CriticLearner], T]) -> asyncio.Future[T]:
        # The same thread created the learner before, so `result` does not block the thread.
        return asyncio.get_running_loop().run_in_executor(self._work, lambda: work(self._learner.result()))


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _store(host: str, port: int, config: PoolConfig) -> Any:
    """Return the store through which the actors form a process group; port 0 starts the store."""
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=config.ready_timeout_s)
    return TCPStore(host, port, is_master=not port, wait_for_workers=False, timeout=timeout)
