"""One device, plain PyTorch, the same contract: for debugging a stage in one process, without Ray or DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import plain_weights
from rl_plugins.models.remote import RemoteLearner
from rl_plugins.rollout.engine import RolloutEngine
from rl_plugins.rollout.weights import ModuleWeightSource, WeightSource
from rl_plugins.strategies.contract import POLICY, HasEngines, RolloutMixin
from rl_plugins.strategies.phases import PhaseLog
from rl_plugins.strategies.sharded import ALL_OF_A_LEARNER, blend_shard


class SingleDeviceRolloutStrategy(RolloutMixin, SingleDeviceStrategy):
    """Lightning's single-device strategy with named engines and a rollout engine.

    Args:
        device: where to train.
        rollout: the engine to sample with; None for stages that do not sample.
        **kwargs: further arguments of Lightning's `SingleDeviceStrategy`.
    """

    def __init__(
        self, device: str | torch.device = "cpu", *, rollout: RolloutEngine | None = None, **kwargs: Any
    ) -> None:
        super().__init__(device=device, **kwargs)
        self._rollout = rollout
        self._gradient_norms: dict[str, float] = {}
        # Averages in float32 of engines in low precision that follow others, by engine and parameter.
        self._masters: dict[str, dict[str, Tensor]] = {}
        self.phases = PhaseLog(device=torch.device(device))

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("rl_single_device", cls, description="One device, with a rollout engine")

    @override
    def setup(self, trainer: Any) -> None:
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigError("precision=16-mixed: clipping here knows nothing of scaled losses: use bf16-mixed")
        if self.precision_plugin.precision == "16-true":
            raise ConfigError("precision=16-true: nothing scales the loss, and float16 overflows: use bf16-true")
        super().setup(trainer)
        if isinstance(self.lightning_module, HasEngines) and trainer.state.fn == TrainerFn.FITTING:
            for model in self.lightning_module.engine_modules().values():
                if not any(_holds(optimizer, model) for optimizer in self.optimizers):
                    model.eval().requires_grad_(False)
                elif self.precision_plugin.precision == "bf16-mixed":
                    # Small steps would be lost in rounding.
                    model.float()
        self.connect_rollout(0, 1)

    @contextmanager
    def sharded_init(self, frozen: str | None = None) -> Iterator[None]:
        """Nothing is sharded."""
        yield

    def engine(self, name: str) -> nn.Module:
        """The model itself."""
        assert isinstance(self.lightning_module, HasEngines)
        return self.lightning_module.engine_modules()[name]

    def accumulate_gradients(self, name: str, *, last: bool) -> None:
        """Autograd accumulates by itself."""

    def gradient_norm(self, name: str) -> float | None:
        """Norm of the last step's gradient, before clipping."""
        return self._gradient_norms.get(name)

    def optimizer_index(self, name: str) -> int:
        """Where the optimizer of engine `name` stands in `optimizers`."""
        model = self.engine(name)
        return next(index for index, optimizer in enumerate(self.optimizers) if _holds(optimizer, model))

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Any, *args: Any, engine: str | None = None, **kwargs: Any
    ) -> Tensor:
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        if isinstance(module, HasEngines) and not module.automatic_optimization:
            # As DeepSpeed does: clipping belongs to the step, and gradients are gone after it.
            name = next(name for name, model in module.engine_modules().items() if _holds(optimizer, model))
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            limit = module.gradient_clip(name) or float("inf")
            self._gradient_norms[name] = float(nn.utils.clip_grad_norm_(parameters, limit))
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if not module.automatic_optimization:
            optimizer.zero_grad()
        self.weights_changed()
        return result

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """There is one rank."""
        return values

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """There is one rank."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """There is one rank."""
        return [value]

    def exchange(self, parcels: list[Any]) -> list[Any]:
        """There is one rank."""
        return parcels

    def blend_weights(self, source: str, target: str, keep: float) -> None:
        """`keep * target + (1 - keep) * source`; in low precision the average is held in float32 beside the weights."""
        if keep == 1:
            return
        masters = self._masters.setdefault(target, {})
        for (name, own), (_, other) in zip(self.shards(target), self.shards(source), strict=True):
            blend_shard(own, other, keep, masters, name)

    def shards(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Each parameter whole."""
        for key, parameter in self.engine(name).named_parameters():
            yield key, parameter.data

    @override
    def weight_source(self, name: str = POLICY) -> WeightSource:
        return plain_weights(ModuleWeightSource(self.engine(name)), self.engine(name))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        for name, learner in self._learners().items():
            learner.save(_beside(filepath, name))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.weights_changed()
        self._masters.clear()
        for name, learner in self._learners().items():
            learner.load(_beside(checkpoint_path, name))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def _learners(self) -> dict[str, RemoteLearner]:
        """Engines that learn elsewhere: what Lightning writes in one file holds nothing of them."""
        module = self.lightning_module
        engines: dict[str, nn.Module] = module.engine_modules() if isinstance(module, HasEngines) else {}
        return {name: model for name, model in engines.items() if isinstance(model, RemoteLearner)}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if isinstance(self.lightning_module, HasEngines):
            engines = self.lightning_module.engine_modules()
            self.restored = {name: self._restored_of(model) for name, model in engines.items()}

    def _restored_of(self, model: nn.Module) -> str:
        if isinstance(model, RemoteLearner):
            return ALL_OF_A_LEARNER
        held = [optimizer for optimizer in self.optimizers if _holds(optimizer, model)]
        scheduled = any(config.scheduler.optimizer in held for config in self.lr_scheduler_configs)
        return "weights" + ", optimizer" * bool(held) + ", schedule" * scheduled


def _beside(file: Any, name: str) -> Path:
    return Path(f"{file}.{name}")


def _holds(optimizer: Any, model: nn.Module) -> bool:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(parameter) in held for parameter in model.parameters())
