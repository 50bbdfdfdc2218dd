"""Contract between a strategy and its users, the stages and callbacks.

A stage names its models in `named_models()`. The strategy makes a model engine of each model. A model with an optimizer
in `configure_optimizers` is trained, with its own sharding, optimizer and gradient clipping. A model without an
optimizer is frozen and only runs.

Lightning calls the hooks of a strategy inside `Trainer.fit`. `setup_environment` starts the rollout engine (`prepare`),
before the stage's `setup`. The strategy's `setup` makes the model engines, and connects the rollout engine (`connect`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from torch import Tensor, nn

from rl_plugins.errors import ConfigError
from rl_plugins.ranks import Ranks
from rl_plugins.strategies.blending import BlendedModels
from rl_plugins.strategies.loss_scale import LossScale
from rl_plugins.strategies.phase_log import PhaseLog
from rl_plugins.weights.source import WeightSource

if TYPE_CHECKING:
    from rl_plugins.strategies.rollout_phases import RolloutPhases

POLICY = "policy"
CRITIC = "critic"
COST_CRITIC = "cost_critic"
REFERENCE = "reference"
REWARD_MODEL = "reward_model"
COST_MODEL = "cost_model"
TEACHER = "teacher"


@runtime_checkable
class HasNamedModels(Protocol):
    """A LightningModule with named models, which become model engines."""

    def named_models(self) -> dict[str, nn.Module]:
        """Return the models by name, after `configure_model`."""

    def gradient_clip(self, name: str) -> float:
        """Return the bound on the global gradient norm of a trained model; 0 for no bound."""


class Strategy(Protocol):
    """Methods and attributes of every strategy of this package.

    `ZeroStrategy`, `FSDPStrategy` and `SingleDeviceRolloutStrategy` fulfil the contract.

    Attributes:
        ranks: this process among the training ranks, since `setup_environment`.
        phase_log: log of time and memory.
        rollout_phases: the rollout engine and its phases.
        blended: models that follow another model.
        restored: for each model, which states the last loaded checkpoint has restored, in words.
        known_intact: checkpoint with intact files, whose files the next load does not compare again; None to compare
            every checkpoint.
        needs_all_parameters: True if each pass of a model must use all parameters of the model.
        lightning_restore_optimizer: Lightning's flag: True if Lightning hands optimizer states to the strategy.
    """

    ranks: Ranks
    phase_log: PhaseLog
    rollout_phases: RolloutPhases
    blended: BlendedModels
    restored: Mapping[str, str]
    known_intact: Path | None

    @property
    def needs_all_parameters(self) -> bool:
        """See the attributes."""

    @property
    def lightning_restore_optimizer(self) -> bool:
        """See the attributes."""

    def sharded_init(self, frozen: str | None = None) -> AbstractContextManager[None]:
        """Shard models during `from_pretrained` inside this context.

        Args:
            frozen: name of a frozen model, to create the shards at the model's offload place; None for trained models.
        """

    def model_engine(self, name: str) -> nn.Module:
        """Return the model engine that runs model `name`."""

    def announce_backward(self, name: str, *, last: bool) -> None:
        """Announce a backward pass of model `name`; `last` is True for the last pass before the optimizer step."""

    def optimizer_index(self, name: str) -> int:
        """Return the index of the optimizer of model `name` in the strategy's `optimizers`."""

    def gradient_norm(self, name: str) -> float | None:
        """Return the global norm of the last step's gradient before clipping.

        None if the norm is unknown, and if the step was left out after an overflow that a smaller scale may prevent.
        """

    def scale_of_loss(self, name: str) -> LossScale | None:
        """Return the scale of the loss of model `name`; None without float16."""

    def weight_source(self, name: str = POLICY) -> WeightSource:
        """Return the weights of model `name`, for a rollout engine or an export."""

    def shards(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each parameter of model `name`, and this rank's shard. Collective.

        After a write to shards of the policy, call `rollout_phases.weights_changed()`.
        """

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint into the model engines; return the state of Lightning's loops and callbacks."""

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights from Lightning's part of a checkpoint."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states from Lightning's part of a checkpoint."""


def strategy_of(trainer: Trainer) -> Strategy:
    """Return the strategy of a trainer.

    Raises:
        ConfigError: the strategy does not fulfil the contract.
    """
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "model_engine"):
        raise ConfigError(
            f"the trainer has Lightning's {type(strategy).__name__} (strategy='auto' takes such a strategy, too), and "
            "a stage needs a strategy of this package: pass strategy=ZeroStrategy(...), FSDPStrategy(...) or "
            "SingleDeviceRolloutStrategy(...) to the trainer; with Ray RayZeroStrategy(...) or RayFSDPStrategy(...)"
        )
    fulfilled: Strategy = strategy
    return fulfilled
