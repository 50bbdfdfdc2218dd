"""Models whose weights follow the weights of another model, such as a reference that follows the policy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rl_plugins.errors import CheckpointError


class BlendedModels:
    """The models that follow another model, and their averages in float32.

    Each rank blends its own shards. A model in low precision has its average in float32 beside its weights, because
    small steps would be lost in rounding.

    Attributes:
        names: models whose weights are no longer the weights of their files. Checkpoints hold these models.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._averages: dict[str, dict[str, Tensor]] = {}

    def blend(
        self, target: str, own: Iterable[tuple[str, Tensor]], other: Iterable[tuple[str, Tensor]], keep: float
    ) -> None:
        """Set each shard of a model to `keep * own + (1 - keep) * other`, in place.

        From now on checkpoints hold the model, also if `keep` is 1 and the weights have not changed yet.

        Args:
            target: name of the model.
            own: name and shard of each of its parameters.
            other: the same of the model that it follows.
            keep: share of the own weights that stays, from 0 to 1.
        """
        self.names.add(target)
        if keep == 1:
            return
        averages = self._averages.setdefault(target, {})
        for (name, own_shard), (_, other_shard) in zip(own, other, strict=True):
            if keep == 0 or own_shard.dtype == torch.float32:
                own_shard.lerp_(other_shard.to(own_shard), 1 - keep)
            else:
                average = averages.setdefault(name, own_shard.float())
                own_shard.copy_(average.lerp_(other_shard.float(), 1 - keep))

    def reset_averages(self) -> None:
        """Start the averages again from the weights that a checkpoint restores."""
        self._averages.clear()

    def check_in(self, checkpoint: Path) -> None:
        """Check that a checkpoint holds every model that follows another one.

        Raises:
            CheckpointError: a model is missing.
        """
        for name in sorted(self.names):
            if not (checkpoint / name).is_dir():
                raise CheckpointError(
                    f"{checkpoint} does not hold model {name!r}, whose weights have changed since: resume the run, "
                    "which loads the model from its own files"
                )
