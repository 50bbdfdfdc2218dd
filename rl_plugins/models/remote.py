"""Interfaces of models that run in other processes, and functions that find these models by their class.

A remote model takes the place of a local model. Its class is a module without parameters, so strategies have nothing to
shard or train.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:
    from rl_plugins.models.log_probs import ResponseLogProbs


@runtime_checkable
class RemoteModel(Protocol):
    """Module for a model in other processes. Each method returns the result of the function with the same name."""

    def position_scores(self, **arguments: Any) -> Tensor:
        """Compute `scalar_head.position_scores` with the remote model."""

    def response_log_probs(self, **arguments: Any) -> ResponseLogProbs:
        """Compute `log_probs.response_log_probs` with the remote model, without a gradient."""


@runtime_checkable
class RemoteLearner(RemoteModel, Protocol):
    """Remote model that is trained in its own processes. Checkpoints must include its state."""

    def has_finite_weights(self) -> bool:
        """Return True if no trained weight is NaN or infinite. One rank calls this method."""

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule. One rank calls this method."""

    def load(self, folder: Path) -> None:
        """Load the files of `save`. One rank calls this method.

        Raises:
            CheckpointError: the folder does not have the files, or the files belong to another model.
        """


def local_models(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models of this process, without models in other processes."""
    return {name: model for name, model in models.items() if not isinstance(model, RemoteModel)}


def learners_of(models: Mapping[str, nn.Module]) -> dict[str, RemoteLearner]:
    """Return the models trained in another process."""
    return {name: model for name, model in models.items() if isinstance(model, RemoteLearner)}
