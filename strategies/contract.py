"""What stages and callbacks may ask of a strategy, whatever shards the models.

A stage names its models in `named_models()`. The strategy makes a model engine of each: a model that an optimizer of
`configure_optimizers` holds is trained, with sharding, optimizer and gradient clipping of its own; a model without
an optimizer is frozen and only runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from torch import Tensor, nn

from rl_plugins.errors import ConfigError
from rl_plugins.ranks import Ranks
from rl_plugins.strategies.phases import PhaseLog
from rl_plugins.weights.source import WeightSource

if TYPE_CHECKING:
    from rl_plugins.strategies.rollout_phase import RolloutPhases

POLICY = "policy"
CRITIC = "critic"
REFERENCE = "reference"
REWARD_MODEL = "reward_model"
TEACHER = "teacher"


@runtime_checkable
class HasNamedModels(Protocol):
    """A LightningModule whose models become model engines."""

    def named_models(self) -> dict[str, nn.Module]:
        """Models by their names, after `configure_model`."""

    def gradient_clip(self, name: str) -> float:
        """Bound on the global gradient norm of a trained model; 0 for no bound."""


class Strategy(Protocol):
    """The contract between stages and strategies.

    `ZeroStrategy`, `FSDPStrategy` and `SingleDeviceRolloutStrategy` fulfil the contract.

    Attributes:
        ranks: this process among the training ranks, since `setup_environment`.
        phases: log of time and memory.
        rollout: the rollout engine, and the phases in which it samples.
        restored: for each model, which states the last loaded checkpoint has restored, in words.
        lightning_restore_optimizer: Lightning's flag: True if Lightning hands optimizer states to the strategy.
    """

    ranks: Ranks
    phases: PhaseLog
    rollout: RolloutPhases
    restored: Mapping[str, str]

    @property
    def lightning_restore_optimizer(self) -> bool:
        """See the attributes."""

    def sharded_init(self, frozen: str | None = None) -> AbstractContextManager[None]:
        """Shard models while they are loaded with `from_pretrained` inside this context.

        Args:
            frozen: name of the model if it is frozen: its shards are made where the strategy keeps frozen models.
        """

    def model_engine(self, name: str) -> nn.Module:
        """Return the model engine that runs model `name`."""

    def accumulate_gradients(self, name: str, *, last: bool) -> None:
        """Announce a backward pass of model `name`; `last` is True for the last one before its optimizer step."""

    def optimizer_index(self, name: str) -> int:
        """Return the index of the optimizer of model `name` in the strategy's `optimizers`."""

    def gradient_norm(self, name: str) -> float | None:
        """Return the global norm of the last step's gradient before clipping; None where it is not known."""

    def weight_source(self, name: str = POLICY) -> WeightSource:
        """Return the weights of model `name`, for a rollout engine or an export."""

    def shards(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this rank's part of each parameter of model `name`. Collective.

        After a write to parts of the policy, call `rollout.weights_changed()`.
        """

    def blend_weights(self, source: str, target: str, keep: float) -> None:
        """Set the weights of model `target` to `keep * target + (1 - keep) * source`, shard by shard. Collective."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint into the model engines; return the state of Lightning's loops and callbacks."""

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights that Lightning's part of a checkpoint holds."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states that Lightning's part of a checkpoint holds."""


def strategy_of(trainer: Trainer) -> Strategy:
    """Return the strategy of a trainer.

    Raises:
        ConfigError: the strategy does not fulfil the contract.
    """
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "model_engine"):
        raise ConfigError(
            f"Trainer(strategy={type(strategy).__name__}): a stage needs a strategy of this package: pass "
            "strategy=ZeroStrategy(...), FSDPStrategy(...) or SingleDeviceRolloutStrategy(...)"
        )
    fulfilled: Strategy = strategy
    return fulfilled
