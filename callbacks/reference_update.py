"""A reference that follows the policy: refreshed now and then, or an average of its weights."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.stages.stage import clock
from rl_plugins.strategies.contract import POLICY, REFERENCE, HasEngines


class ReferenceUpdate(Callback):
    """Moves the weights of the reference towards the policy's, at the end of every `every`-th step.

    What the reference has become is in every checkpoint.

    Args:
        every: steps between two moves.
        keep: share of the reference's weights that a move keeps: 0 makes it a copy of the policy, 0.99 an exponential
            moving average.

    Raises:
        ConfigError: `every` below 1, or `keep` outside [0, 1).
    """

    def __init__(self, *, every: int = 1, keep: float = 0.0) -> None:
        if every < 1:
            raise ConfigError(f"reference.update_every={every}: must be at least 1")
        if not 0 <= keep < 1:
            raise ConfigError(f"reference.keep={keep}: must be from 0 to below 1")
        self._every, self._keep = every, keep
        self._clock = -1

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if getattr(pl_module, "reference_is_base", False):
            raise ConfigError(
                "the reference is the policy with its adapter off, and cannot follow the policy: leave "
                "reference.update_every at 0, or name another folder of the same model with reference.path"
            )
        if not isinstance(pl_module, HasEngines) or REFERENCE not in pl_module.engine_modules():
            raise ConfigError(
                "the reference is to follow the policy, and nothing asks for a reference: give "
                "algorithm.kl.coefficient a value, or leave reference.update_every at 0"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = clock(pl_module)
        # A move that keeps all: checkpoints from before the first one hold the reference, too, for a roll-back.
        self._blend(trainer, keep=1.0)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._clock = self._clock, clock(pl_module)
        # A run that was rolled back comes by its checkpoint's step again, and has moved it then.
        if self._clock > before and self._clock % self._every == 0:
            self._blend(trainer, self._keep)

    def _blend(self, trainer: Trainer, keep: float) -> None:
        strategy: Any = trainer.strategy
        strategy.blend_weights(POLICY, REFERENCE, keep)
