"""Critic in a separate pool: computes values, and is trained at the same time as the policy.

Each actor of the pool holds the same critic. A training rank submits its rows of a mini-batch directly to the actors,
and waits for updates only at the end of the step. An update begins when the rows of all ranks have arrived, in the same
order of updates in every actor. The event loop of an actor answers calls during an update. One thread does the work,
first in, first out.

The process of rank 0 owns the actors. When an actor is lost, the state of the critic is incomplete, so the ranks fail.
When the ranks restart, the critic restarts too, from the same checkpoint.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from typing_extensions import override

from rl_plugins.addresses import own_address
from rl_plugins.algorithms.aggregation import GlobalCounts
from rl_plugins.algorithms.inputs import one_rank
from rl_plugins.connections import ListeningStore, StoreAddress, join_store
from rl_plugins.data.experience import Experience
from rl_plugins.data.images import IMAGE_INPUTS
from rl_plugins.errors import UserError
from rl_plugins.models.pool import ModelPool, spread
from rl_plugins.models.pool_actor import Arrays, PoolConfig, process_name
from rl_plugins.stages.critic_training import FIELDS, CriticLearner, CriticTraining, Learnt
from rl_plugins.stages.metrics import TokenMetrics, metrics_of_update

T = TypeVar("T")

# Required fields of an Experience, and the sequences. The critic's loss also needs the critic's own fields.
_SENT = (
    "prompts", "prompt_lengths", "responses", "response_lengths", "response_mask", "rollout_log_probs",
    "policy_versions", "groups", "valid", "sequences",
)  # fmt: skip


class CriticLost(RuntimeError):
    """An actor of the critic's pool failed, so the updates of the critic since the last checkpoint are lost."""


class CriticPool(ModelPool):
    """`RemoteLearner` of a training rank: the client of the critic's pool.

    Args:
        config: settings of the pool.
        options: Ray options of each actor: placement and resources.
        rank: index of this rank.
    """

    def __init__(self, config: PoolConfig, options: Sequence[dict[str, Any]], rank: int = 0) -> None:
        super().__init__(config, rank)
        self._options, self._ranks = options, 0
        # Handles of rank 0. An actor ends with its handle.
        self._own: list[Any] = []
        self._updates = 0
        self._learning: list[list[tuple[int, Any]]] = []

    def begin(self, training: CriticTraining, gather: Callable[[Any], list[Any]]) -> None:
        """Start the actors, from rank 0, without waiting; later calls do nothing. Collective.

        Args:
            training: model and settings of the critic's training.
            gather: collective function; returns the values of all ranks.
        """
        if self._ranks:
            return
        config = replace(self.config, name=f"{self.config.name}-{uuid.uuid4().hex[:8]}")
        if self._rank == 0:
            self._own = start_critic(config, training, self._options)
        names = gather(config.name)
        self.config, self._ranks = replace(config, name=names[0]), len(names)

    def learn(self, mini_batch: Experience, counts: GlobalCounts, *, last: bool) -> None:
        """Submit this rank's rows for an optimizer step of the critic, without waiting for the step.

        The optimizer step begins when all ranks have submitted their rows.

        Args:
            mini_batch: rows of this rank, with the critic's values and returns.
            counts: global counts of the mini-batch of all ranks.
            last: True for the last mini-batch of the step.
        """
        self._connect()
        trimmed = mini_batch.trimmed()
        sent = (*_SENT, *FIELDS[self.config.role])
        images = {name: values for name, values in trimmed.columns.items() if name == IMAGE_INPUTS}
        rows = Experience(**{name: getattr(trimmed, name) for name in sent}, rows=images, batch_size=trimmed.batch_size)
        actors = len(self._actors)
        parts = spread(rows.sequence_lengths.tolist(), actors)
        calls = []
        for place in range(actors):
            part = rows[torch.tensor(parts[place] if place < len(parts) else [], dtype=torch.int64)]
            number = (self._rank + place) % actors
            call = self._updates, self._rank, self._ranks, part, replace(counts, ranks=1), last
            calls.append((number, self._actors[number].learn.remote(*call)))
        self._updates += 1
        self._learning.append(sorted(calls, key=lambda call: call[0]))

    def wait_for_updates(self) -> dict[str, float]:
        """Wait for all submitted updates, and return the metrics, equal on every rank."""
        metrics = TokenMetrics()
        answers: list[Learnt] = []
        for calls in self._learning:
            answers = self._wait(calls, self.config.call_timeout_s, "learn")
            for answer in answers:
                metrics.take_in(answer.metrics)
        self._learning = []
        prefix, newest = f"train/{self.config.role}", answers[-1]
        rates = metrics_of_update(prefix, newest.lr, newest.gradient_norm, newest.loss_scale)
        return {**metrics.averages(one_rank, one_rank), **rates}

    def has_finite_weights(self) -> bool:
        """Return True if no trained weight of the critic is NaN or infinite."""
        self._connect()
        # All actors hold the same state.
        call = self._actors[0].has_finite_weights.remote()
        return all(self._wait([(0, call)], self.config.call_timeout_s, "check its weights"))

    def save(self, folder: Path) -> None:
        """Let an actor write the critic to a folder.

        Raises:
            OSError: the actor cannot write.
        """
        self._connect()
        # All actors hold the same state.
        self._wait([(0, self._actors[0].save.remote(folder))], self.config.call_timeout_s, f"write {folder}")

    def load(self, folder: Path) -> None:
        """Let all actors read the critic from a folder.

        Raises:
            CheckpointError: see `CriticLearner.load`.
        """
        self._connect()
        calls = [(number, actor.load.remote(folder)) for number, actor in enumerate(self._actors)]
        self._wait(calls, self.config.ready_timeout_s, f"read {folder}")

    @override
    def _wait(self, calls: Sequence[tuple[int, Any]], timeout_s: float, task: str) -> list[Any]:
        import ray

        try:
            return super()._wait(calls, timeout_s, task)
        except UserError:
            raise
        except ray.exceptions.RayError as error:
            # The critic is whole after a failed write.
            if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, OSError):
                raise error.cause from None
            raise CriticLost(
                f"rank {self._rank}: the pool {self.config.role} failed to {task}. The updates of the critic since "
                "the last checkpoint are lost, so the workers must restart from the checkpoint"
            ) from error


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
        self._store: ListeningStore | None = None
        if first is None and config.actors > 1:
            self._store = ListeningStore(own_address(), config.ready_timeout_s)
        self._learner = self._work.submit(self._start, training, first)

    def _start(self, training: CriticTraining, first: Any) -> CriticLearner:
        config = self._config
        torch.set_num_threads(config.threads)
        if config.device == "cuda":
            # TF32 for products of float32 numbers.
            torch.set_float32_matmul_precision("high")
        if config.actors > 1:
            torch.distributed.init_process_group(
                "nccl" if config.device == "cuda" else "gloo",
                store=join_store(self._address_of(first), config.ready_timeout_s),
                rank=self._number,
                world_size=config.actors,
                timeout=timedelta(seconds=config.call_timeout_s),
            )
        return CriticLearner(training, config.device)

    def _address_of(self, first: Any) -> StoreAddress:
        if self._store is not None:
            return self._store.address
        import ray

        address: StoreAddress = ray.get(first.address.remote(), timeout=self._config.ready_timeout_s)
        return address

    async def address(self) -> StoreAddress:
        """Return the address of the process group's store, which the first actor runs."""
        assert self._store is not None
        return self._store.address

    async def ready(self) -> str:
        """Wait until the critic is loaded, and return the name of the process."""
        await asyncio.wrap_future(self._learner)
        return process_name()

    async def scores(self, rows: Arrays, options: dict[str, Any]) -> tuple[str, Arrays]:
        """Return the name of the process, and `position_scores` of `rows`."""

        def run(learner: CriticLearner) -> Arrays:
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

    async def has_finite_weights(self) -> bool:
        """Return True if no trained weight is NaN or infinite."""
        return await self._run(CriticLearner.has_finite_weights)

    async def save(self, folder: Path) -> None:
        """Write the critic to a folder."""
        await self._run(lambda learner: learner.save(folder))

    async def load(self, folder: Path) -> None:
        """Read the critic from a folder."""
        await self._run(lambda learner: learner.load(folder))

    def _run(self, work: Callable[[CriticLearner], T]) -> asyncio.Future[T]:
        # The same thread created the learner before, so `result` does not block the thread.
        return asyncio.get_running_loop().run_in_executor(self._work, lambda: work(self._learner.result()))
