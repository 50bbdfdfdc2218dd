"""A critic on a pool of its own, as a training rank sees it: it gives values, and learns while the policy does.

A rank sends rows straight to the processes (`critic_actor.py`), which it does not wait for before the end of the step.
They belong to rank 0's process: when one of them is lost, what the critic has learnt is not whole any more, so the
ranks fail, and when they start again, so does the critic, from the same checkpoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from rl_plugins.algorithms.aggregation import GlobalCounts
from rl_plugins.data.experience import Experience
from rl_plugins.errors import ConfigError
from rl_plugins.models.pool import ModelPool, spread
from rl_plugins.models.pool_actor import PoolConfig
from rl_plugins.models.remote import RemoteLearner
from rl_plugins.stages.critic_actor import start_critic
from rl_plugins.stages.metrics import TokenMetrics

if TYPE_CHECKING:
    from rl_plugins.stages.critic_learner import CriticTraining, Learnt

# What the critic's loss looks at, and what an Experience cannot be without.
_SENT = (
    "prompts", "prompt_lengths", "responses", "response_lengths", "response_mask", "rollout_log_probs",
    "policy_versions", "groups", "valid", "values", "returns",
)  # fmt: skip


class CriticLost(RuntimeError):
    """A process of the critic's pool failed, and with it what the critic has learnt since the last checkpoint."""


class CriticPool(ModelPool, RemoteLearner):
    """What a training rank holds of the critic's pool.

    Args:
        config: the pool.
        options: Ray's for each of its processes: where it runs, and what it takes.
        rank: this one.
    """

    def __init__(self, config: PoolConfig, options: Sequence[dict[str, Any]], rank: int = 0) -> None:
        super().__init__(config, rank)
        self._options, self._ranks = options, 0
        # They live as long as these handles.
        self._own: list[Any] = []
        self._updates = 0
        self._learning: list[list[tuple[int, Any]]] = []

    def begin(self, training: CriticTraining, gather: Callable[[Any], list[Any]]) -> None:
        """Rank 0 starts the processes, once; nobody waits for them. Collective.

        Args:
            training: what they do.
            gather: gives every rank the values of all.
        """
        if self._ranks:
            return
        config = replace(self.config, name=f"{self.config.name}-{uuid.uuid4().hex[:8]}")
        if self._rank == 0:
            self._own = start_critic(config, training, self._options)
        names = gather(config.name)
        self.config, self._ranks = replace(config, name=names[0]), len(names)

    def learn(self, mini_batch: Experience, counts: GlobalCounts, *, last: bool) -> None:
        """Have the critic take an optimizer step when all ranks have sent their rows; does not wait for it.

        Args:
            mini_batch: this rank's rows, with `values` and `returns`.
            counts: of the mini-batch of all ranks.
            last: it is the last one of the step.
        """
        self._connect()
        trimmed = mini_batch.trimmed()
        rows = Experience(**{name: getattr(trimmed, name) for name in _SENT}, batch_size=trimmed.batch_size)
        actors = len(self._actors)
        parts = spread(rows.sequence_lengths.tolist(), actors)
        asked = []
        for place in range(actors):
            part = rows[torch.tensor(parts[place] if place < len(parts) else [], dtype=torch.int64)]
            number = (self._rank + place) % actors
            sent = self._updates, self._rank, self._ranks, part, replace(counts, ranks=1), last
            asked.append((number, self._actors[number].learn.remote(*sent)))
        self._updates += 1
        self._learning.append(sorted(asked, key=lambda one: one[0]))

    def learnt(self) -> dict[str, float]:
        """Wait for all that was to be learnt; returns the metrics of it, the same on every rank."""
        metrics = TokenMetrics()
        answers: list[Learnt] = []
        for asked in self._learning:
            answers = self._wait(asked, self.config.call_timeout_s, "learn")
            for answer in answers:
                metrics.take_in(answer.metrics)
        self._learning = []
        prefix, newest = f"train/{self.config.role}", answers[-1]
        rates = {f"{prefix}/lr": newest.lr, f"{prefix}/gradient_norm": newest.gradient_norm}
        return {**metrics.averages(_alone, _alone), **rates}

    @override
    def save(self, folder: Path) -> None:
        self._connect()
        # All of them hold the same.
        self._wait([(0, self._actors[0].save.remote(folder))], self.config.call_timeout_s, f"write {folder}")

    @override
    def load(self, folder: Path) -> None:
        self._connect()
        asked = [(number, actor.load.remote(folder)) for number, actor in enumerate(self._actors)]
        self._wait(asked, self.config.ready_timeout_s, f"read {folder}")

    @override
    def _wait(self, asked: Sequence[tuple[int, Any]], timeout_s: float, what: str) -> list[Any]:
        import ray

        try:
            return super()._wait(asked, timeout_s, what)
        except ConfigError:
            raise
        except ray.exceptions.RayError as error:
            raise CriticLost(
                f"rank {self._rank} asked the pool {self.config.role} to {what}, and it failed: what the critic has "
                "learnt since the last checkpoint is lost, so the workers must start again from there"
            ) from error


def _alone(values: Tensor) -> Tensor:
    return values
