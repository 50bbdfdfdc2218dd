"""Client of a critic in a separate pool: computes values, and trains the critic at the same time as the policy.

A rank sends rows directly to the actors (`critic_actor.py`), and waits for updates only at the end of the step. The
process of rank 0 owns the actors. When an actor is lost, the state of the critic is incomplete, so the ranks fail. When
the ranks restart, the critic restarts too, from the same checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from rl_plugins.algorithms.aggregation import GlobalCounts
from rl_plugins.algorithms.inputs import one_rank
from rl_plugins.data.experience import Experience
from rl_plugins.errors import UserError
from rl_plugins.models.pool import ModelPool, spread
from rl_plugins.models.pool_actor import PoolConfig
from rl_plugins.stages.critic_actor import start_critic
from rl_plugins.stages.metrics import TokenMetrics

if TYPE_CHECKING:
    from rl_plugins.stages.critic_learner import CriticTraining, Learnt

# Inputs of the critic's loss, and required fields of an Experience.
_SENT = (
    "prompts", "prompt_lengths", "responses", "response_lengths", "response_mask", "rollout_log_probs",
    "policy_versions", "groups", "valid", "values", "returns",
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
            mini_batch: rows of this rank, with `values` and `returns`.
            counts: global counts of the mini-batch of all ranks.
            last: True for the last mini-batch of the step.
        """
        self._connect()
        trimmed = mini_batch.trimmed()
        rows = Experience(**{name: getattr(trimmed, name) for name in _SENT}, batch_size=trimmed.batch_size)
        actors = len(self._actors)
        parts = spread(rows.sequence_lengths.tolist(), actors)
        calls = []
        for place in range(actors):
            part = rows[torch.tensor(parts[place] if place < len(parts) else [], dtype=torch.int64)]
            number = (self._rank + place) % actors
            sent = self._updates, self._rank, self._ranks, part, replace(counts, ranks=1), last
            calls.append((number, self._actors[number].learn.remote(*sent)))
        self._updates += 1
        self._learning.append(sorted(calls, key=lambda call: call[0]))

    def learnt(self) -> dict[str, float]:
        """Wait for all submitted updates, and return the metrics, equal on every rank."""
        metrics = TokenMetrics()
        answers: list[Learnt] = []
        for calls in self._learning:
            answers = self._wait(calls, self.config.call_timeout_s, "learn")
            for answer in answers:
                metrics.take_in(answer.metrics)
        self._learning = []
        prefix, newest = f"train/{self.config.role}", answers[-1]
        rates = {f"{prefix}/lr": newest.lr, f"{prefix}/gradient_norm": newest.gradient_norm}
        return {**metrics.averages(one_rank, one_rank), **rates}

    def save(self, folder: Path) -> None:
        """Let an actor write the critic to a folder."""
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
            raise CriticLost(
                f"rank {self._rank}: the pool {self.config.role} failed to {task}. The updates of the critic since "
                "the last checkpoint are lost, so the workers must restart from the checkpoint"
            ) from error
