"""Backward passes and optimizer steps of PyTorch, for strategies whose model engine is the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from rl_plugins.config.precision import FLOAT16
from rl_plugins.errors import ConfigError
from rl_plugins.ranks import Ranks
from rl_plugins.strategies.contract import HasNamedModels
from rl_plugins.strategies.loss_scale import LossScale
from rl_plugins.strategies.rollout_phases import RolloutPhases

_LOSS_SCALES = "loss_scales"
"""Key of the scales in Lightning's part of a checkpoint."""


class AutogradSteps(LightningStrategy):
    """Backward passes and optimizer steps of a strategy whose model engine is the model itself.

    A subclass has a strategy of Lightning as its second base, and sets `_optimizers_of` in `setup`.
    """

    ranks: Ranks
    rollout_phases: RolloutPhases

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._optimizers_of: dict[str, Optimizer] = {}
        self._gradient_norms: dict[str, float | None] = {}
        self._loss_scales: dict[str, LossScale] = {}

    @property
    def needs_all_parameters(self) -> bool:
        """Ranks gather parameters and sum gradients together."""
        return self.ranks.world_size > 1

    def clip_gradients(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        """Scale gradients to a global norm of at most `limit`; return the norm before. Collective."""
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    def gradient_norm(self, name: str) -> float | None:
        """Return the global norm of the last step's gradient before clipping; None after an overflow of float16."""
        return self._gradient_norms.get(name)

    def scale_of_loss(self, name: str) -> LossScale | None:
        """Return the scale of the loss of model `name`; None without float16."""
        return self._loss_scales.setdefault(name, LossScale()) if self._is_float16 else None

    @property
    def _is_float16(self) -> bool:
        return self.precision_plugin.precision == FLOAT16

    def add_loss_scales(self, checkpoint: dict[str, Any]) -> None:
        """Add the scales to Lightning's part of a checkpoint."""
        if self._loss_scales:
            checkpoint[_LOSS_SCALES] = {name: asdict(scale) for name, scale in self._loss_scales.items()}

    def restore_loss_scales(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the scales of Lightning's part of a checkpoint. Models without a saved scale begin anew."""
        saved = checkpoint.get(_LOSS_SCALES, {}) if self._is_float16 else {}
        self._loss_scales = {name: LossScale(**state) for name, state in saved.items()}

    def optimizer_index(self, name: str) -> int:
        """Return the index of the optimizer of model `name` in `optimizers`."""
        return next(i for i, optimizer in enumerate(self.optimizers) if optimizer is self._optimizers_of[name])

    @override
    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        *args: Any,
        model_name: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute gradients; Lightning calls `backward` from `manual_backward`, or from its own loop.

        Autograd finds the parameters from the loss. Therefore `model_name`, which ZeRO needs, only names the scale.

        Raises:
            ConfigError: in float16, a module that is no stage trains, or `model_name` is missing.
        """
        if model_name is None and self._is_float16:
            way_out = (
                "pass model_name=... to manual_backward, which names the scale of the loss"
                if isinstance(self.lightning_module, HasNamedModels)
                else "only stages scale their losses: use bf16-mixed"
            )
            raise ConfigError(f"precision=16-mixed: {way_out}")
        scale = None if model_name is None else self.scale_of_loss(model_name)
        if scale is not None:
            closure_loss = scale.scaled(closure_loss)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the model of `optimizer`. The next rollout phase then sends the weights to the rollout engine.

        Lightning calls `optimizer_step` from `LightningOptimizer.step`; `super()` calls `optimizer.step`, which updates
        the parameters, or shards, of this rank. After an overflow of float16, the step is left out on all ranks.
        """
        self.rollout_phases.memory.wait_for_optimizer()
        module = self.lightning_module
        stage = module if isinstance(module, HasNamedModels) and not module.automatic_optimization else None
        result, is_finite = None, True
        if stage is not None:
            # Like DeepSpeed: the step clips and clears the gradients.
            name = next(name for name, own in self._optimizers_of.items() if own is optimizer)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            is_finite = self._clip(name, parameters, stage.gradient_clip(name) or float("inf"))
        if is_finite:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if stage is not None:
            # The optimizer may have only a part of the parameters.
            stage.named_models()[name].zero_grad()
        self.rollout_phases.weights_changed()
        return result

    def _clip(self, name: str, parameters: Sequence[nn.Parameter], limit: float) -> bool:
        """Clip the gradients of a model; return False if gradients of float16 are not finite. Collective."""
        scale = self.scale_of_loss(name)
        if scale is not None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            scale.unscale(one.to_local() if isinstance(one, DTensor) else one for one in gradients)
        norm = self.clip_gradients(parameters, limit)
        self._gradient_norms[name] = norm if scale is None else scale.known_norm(norm)
        return scale is None or scale.update(norm)
