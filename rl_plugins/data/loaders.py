"""Loaders: each rank's share of the training steps and of the rows for validation.

An order is a pure function of (seed, step), so one number is the whole state; a curriculum adds the groups observed so
far. Step `s` of training belongs to epoch `s // steps_per_epoch`. The ranks take the rows of the step's global batch in
turn. A rank's share depends on the world size, the global batch does not: a run may resume on another number of ranks,
and the first k rows of every rank are together the first k x world_size rows of the global batch.

`StepLoader` implements the `state_dict` / `load_state_dict` protocol, by which Lightning stores a train loader in the
checkpoint. One iteration is always `len(loader)` steps from the loader's position, across the end of an epoch if
necessary. Lightning ends its epochs by its own count, so no step is repeated or skipped after a restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from rl_plugins.data.curriculum import Curriculum, GroupResult
from rl_plugins.data.orders import Order, Shuffled
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.ranks import Ranks

Batch = TypeVar("Batch", covariant=True)


class BatchSource(Protocol[Batch]):
    """A data set that makes a batch of any of its rows."""

    @property
    def kept(self) -> np.ndarray:
        """Number of each row in the loaded data set, ascending, int64 [N]."""

    @property
    def fingerprint(self) -> str:
        """Digest of the rows and their order."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the rows at the indices."""


class StepLoader(Generic[Batch]):
    """Serve one rank's share of the global batch of every training step."""

    def __init__(
        self,
        source: BatchSource[Batch],
        *,
        prompts_per_step: int,
        seed: int = 0,
        order: Order | None = None,
        first_epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        in_flight: Callable[[], int] = lambda: 0,
    ) -> None:
        """Set the options.

        Args:
            source: the data set.
            prompts_per_step: rows in the global batch of one step, over all ranks.
            seed: seed of the order.
            order: rows of each step; by default every row once in an epoch, in a random order.
            first_epoch: number of the first epoch, unless a state is loaded.
            rank: number of this process, from 0.
            world_size: number of processes in training.
            in_flight: function that returns the number of served batches with an unfinished training step. The state
                does not count these batches, so a checkpoint of a failed step serves the step's batch again.

        Raises:
            ConfigError: the world size does not divide `prompts_per_step`, or there are fewer rows than
                `prompts_per_step`.
        """
        if prompts_per_step < 1 or prompts_per_step % world_size:
            upper = max(1, -(-prompts_per_step // world_size)) * world_size
            raise ConfigError(
                f"prompts_per_step={prompts_per_step} cannot be shared equally by {world_size} ranks: "
                f"set prompts_per_step to a multiple of {world_size}, such as {upper}"
            )
        if len(source) < prompts_per_step:
            raise ConfigError(
                f"the data has {len(source)} rows, fewer than prompts_per_step={prompts_per_step}: "
                f"lower prompts_per_step or add data"
            )
        self.source = source
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.order = order or Shuffled(len(source), prompts_per_step=prompts_per_step, seed=seed)
        self._rank = rank
        self._world_size = world_size
        self._in_flight = in_flight
        self.step = self._first_step = first_epoch * len(self)

    def __len__(self) -> int:
        """Return the number of steps in an epoch; the rows of an incomplete last batch are dropped."""
        return len(self.source) // self.prompts_per_step

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's share of the next `len(self)` steps."""
        for _ in range(len(self)):
            yield self.draw()

    def draw(self) -> Batch:
        """Return this rank's share of the next step. A training step that needs more prompts may call it again."""
        epoch = self.step // len(self)
        indices = self.order.batch(self.step)[self._rank :: self._world_size].tolist()
        self.step += 1
        return self.source.batch(indices, epoch)

    @property
    def curriculum(self) -> Curriculum | None:
        """Order of the loader if it is a curriculum, else None."""
        return self.order if isinstance(self.order, Curriculum) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished steps, the settings of the order, and the state of the curriculum."""
        unfinished = min(self._in_flight(), self.step - self._first_step)
        curriculum = {} if self.curriculum is None else {"curriculum": self.curriculum.state_dict()}
        return {"step": self.step - unfinished, **curriculum, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the steps of `state`.

        Raises:
            CheckpointError: the data, the seed, the batch size or the order differs from the checkpoint's.
        """
        differing = [
            f"{name} was {state.get(name)} and is now {value}"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if differing:
            raise CheckpointError(
                f"the checkpoint was made with other data settings: {'; '.join(differing)}. Restore these settings to "
                "resume, or start a new run from the checkpoint's weights"
            )
        self.step = self._first_step = int(state["step"])
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "rows": len(self.source),
            "prompts_per_step": self.prompts_per_step,
            "fingerprint": self.source.fingerprint,
            "order": self.order.identity or None,
        }


class EvalLoader(Generic[Batch]):
    """Serve every row exactly once, in order: a contiguous share per rank, at most `batch_size` at a time.

    Every rank has the same number of batches, because ranks may wait for one another in each batch. Shares and batches
    may differ by one row, and a rank's batch is empty if there are fewer rows than ranks.
    """

    def __init__(self, source: BatchSource[Batch], *, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        """Share the rows of `source` between the ranks."""
        if batch_size < 1:
            raise ConfigError(f"eval_batch_size={batch_size}: set it to 1 or more")
        self.source = source
        shares = np.array_split(np.arange(len(source)), world_size)
        self._batches = np.array_split(shares[rank], -(-len(shares[0]) // batch_size))

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches."""
        for indices in self._batches:
            yield self.source.batch(indices.tolist(), 0)


@dataclass(frozen=True)
class PromptSource:
    """The data loader of training, as a stage uses it beside Lightning's loop: further prompts, and the curriculum.

    Attributes:
        loader: returns the trainer's data loader.
        ranks: this rank and the others.
    """

    loader: Callable[[], Any]
    ranks: Ranks

    def draw(self) -> PromptBatch:
        """Return this rank's next batch of prompts.

        Raises:
            ConfigError: the data loader cannot draw.
        """
        loader = self.loader()
        if not hasattr(loader, "draw"):
            raise ConfigError(
                f"dynamic sampling, and sampling ahead, draw further prompts, and {type(loader).__name__} has no "
                "`draw`: use PromptDataModule, or a loader with a method `draw() -> PromptBatch`"
            )
        prompts: PromptBatch = loader.draw()
        return prompts

    def update_curriculum(self, results: Sequence[GroupResult]) -> dict[str, float]:
        """Report the groups of a step on this rank to the curriculum; return the curriculum's metrics. Collective."""
        loader = self.loader()
        if not isinstance(loader, StepLoader) or loader.curriculum is None:
            return {}
        gathered = self.ranks.gather(results)
        loader.curriculum.observe(result for of_rank in gathered for result in of_rank)
        return loader.curriculum.metrics()
