"""What every stage shares: a policy, one clock, metrics on that clock, and optimizer steps over micro-batches.

A batch of Lightning is one step of the stage's clock (`step`), however many optimizer steps it takes. Checkpoints,
evaluation, logging and schedules use this clock; Lightning's `global_step` counts optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.stages.optimizer import OptimizerConfig
from rl_plugins.strategies.contract import POLICY

_DTYPES = {
    "64-true": torch.float64, "32-true": torch.float32, "16-true": torch.float16, "16-mixed": torch.float32
}  # fmt: skip


class StageOptions(TypedDict, total=False):
    """Arguments that every stage hands on to `Stage`."""

    optimizer: OptimizerConfig | None
    gradient_checkpointing: bool
    max_steps: int


class Stage(LightningModule):
    """A stage that trains a policy.

    Args:
        policy: a Hugging Face name or folder, a model with the forward of a Hugging Face causal language model, or a
            LightningModule that holds one as `.model` (since its constructor or its `configure_model`), whose
            `configure_optimizers` is used. Its other hooks are not called.
        optimizer: for policies that do not bring their own.
        gradient_checkpointing: recompute activations (policies loaded by name).
        max_steps: steps of the clock after which training stops; 0 for no bound.
    """

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        optimizer: OptimizerConfig | None = None,
        gradient_checkpointing: bool = False,
        max_steps: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.optimizer_config = optimizer or OptimizerConfig()
        self.gradient_clip = self.optimizer_config.gradient_clip
        self.max_steps = max_steps
        self.step = 0
        self.policy: Any = None
        # In a list, so that nn.Module does not register it: its parameters are those of `policy`.
        self._source = [policy]
        self._gradient_checkpointing = gradient_checkpointing

    # Models -----------------------------------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = self._own_model()

    def _own_model(self) -> nn.Module:
        source: Any = self._source[0]
        model = source
        if isinstance(source, str):
            return self.load_model(source)
        if isinstance(source, LightningModule):
            # Its configure_optimizers may ask the trainer for the number of steps.
            source.trainer = self.trainer
            with self._sharded_init():
                source.configure_model()
            model = getattr(source, "model", None)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{type(source).__name__} has no `.model` that is an nn.Module: no policy to train")
        return model

    def load_model(self, path: str) -> nn.Module:
        """Load a causal language model in the precision of the trainer, sharded as the strategy shards it."""
        with self._sharded_init():
            return load_causal_lm(path, dtype=self.model_dtype, gradient_checkpointing=self._gradient_checkpointing)

    def _sharded_init(self) -> AbstractContextManager[None]:
        sharded_init = getattr(self.trainer.strategy, "sharded_init", nullcontext)
        context: AbstractContextManager[None] = sharded_init()
        return context

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of parameters that the trainer's `precision` asks for."""
        return _DTYPES.get(str(self.trainer.precision), torch.bfloat16)

    def engine_modules(self) -> dict[str, nn.Module]:
        """The models that the strategy makes engines of."""
        return {POLICY: self.policy}

    @override
    def configure_optimizers(self) -> Any:
        source = self._source[0]
        if isinstance(source, LightningModule) and is_overridden("configure_optimizers", source):
            return source.configure_optimizers()
        config = self.optimizer_config
        optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        scheduler = LambdaLR(optimizer, config.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # The step ---------------------------------------------------------------------------------------------------

    def optimize(self, losses: Iterable[tuple[Tensor, bool]]) -> None:
        """Accumulate the gradients of `(loss, is the last)` and take one optimizer step of the policy."""
        strategy: Any = self.trainer.strategy
        for loss, last in losses:
            strategy.accumulate_gradients(POLICY, last=last)
            self.manual_backward(loss, engine=POLICY)
        self._policy_optimizer().step()

    def _policy_optimizer(self) -> Any:
        optimizers = self.optimizers()
        return optimizers[0] if isinstance(optimizers, list) else optimizers

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Schedules, metrics and the clock, once per batch."""
        # The rate of this step, before the schedules set that of the next.
        rates = {"train/lr": float(self._policy_optimizer().param_groups[0]["lr"])}
        self.step += 1
        self._step_schedulers("step", self.step)
        strategy: Any = self.trainer.strategy
        norm = strategy.gradient_norm(POLICY)
        if norm is not None:
            rates["train/gradient_norm"] = norm
        self.track({**metrics, **rates, **strategy.phases.drain()})
        if self.max_steps and self.step >= self.max_steps:
            self.trainer.should_stop = True

    @override
    def on_train_epoch_end(self) -> None:
        self._step_schedulers("epoch", self.trainer.current_epoch + 1)

    def _step_schedulers(self, interval: str, count: int) -> None:
        # What Lightning does by itself in automatic optimization only.
        for config in self.trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            if config.interval == interval and count % config.frequency == 0:
                scheduler.step()

    def track(self, metrics: Mapping[str, float]) -> None:
        """Send metrics to every logger on the stage's clock, and make them known to callbacks and progress bars."""
        for logger in self.trainer.loggers:
            logger.log_metrics(dict(metrics), step=self.step)
        for name, value in metrics.items():
            self.log(name, value, logger=False)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        # Batches are token ids in Python lists; micro-batches go to the device one at a time.
        return batch

    # State ------------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["stage"] = {"step": self.step}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.step = checkpoint["stage"]["step"]


def clock(module: LightningModule) -> int:
    """The stage's clock.

    Raises:
        ConfigError: the module is not a stage.
    """
    if not isinstance(module, Stage):
        raise ConfigError(f"{type(module).__name__} is not a stage: this callback follows the clock of one")
    return module.step
