"""Models that follow the weights of another model, such as a reference that follows the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from rl_plugins.errors import CheckpointError


class BlendedModels:
    """Names of the models that follow another model. Each rank blends its own shards.

    Attributes:
        names: models with other weights than in their files. Checkpoints hold these models.
    """

    def __init__(self, shards: Callable[[str], Iterable[tuple[str, Tensor]]]) -> None:
        self._shards = shards
        self.names: set[str] = set()

    def blend(self, source: str, target: str, keep: float, averages: dict[str, Tensor]) -> None:
        """Set each shard of model `target` to `keep * target + (1 - keep) * source`, in place. Collective.

        Later checkpoints hold the model, also if `keep` is 1 and the weights have not changed.

        Args:
            source: name of the followed model.
            target: name of the following model.
            keep: share of the own weights in the result, from 0 to 1.
            averages: shards in float32 by name, for a model in low precision, whose rounding would remove small steps.
                Missing shards start from the model.
        """
        self.names.add(target)
        if keep == 1:
            return
        shards = zip(self._shards(target), self._shards(source), strict=True)
        for (name, own_shard), (_, other_shard) in shards:
            if keep == 0 or own_shard.dtype == torch.float32:
                own_shard.lerp_(other_shard.to(own_shard), 1 - keep)
            else:
                average = averages[name].to(own_shard.device) if name in averages else own_shard.float()
                averages[name] = average.lerp_(other_shard.to(average), 1 - keep)
                own_shard.copy_(average)

    def check_in(self, checkpoint: Path) -> None:
        """Check a checkpoint for the weights of every model in `names`.

        Raises:
            CheckpointError: a model is missing.
        """
        for name in sorted(self.names):
            if not (checkpoint / name).is_dir():
                raise CheckpointError(
                    f"{checkpoint} does not hold model {name!r}, and training has changed the model's weights: start "
                    "a new process with this checkpoint, which loads the model from its own files"
                )
