"""Interfaces of models that run in other processes.

A remote model takes the place of a local model. Its class is a module without parameters, so strategies have nothing to
shard or train.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

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

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule. One rank calls this method."""

    def load(self, folder: Path) -> None:
        """Load the files of `save`. One rank calls this method.

        Raises:
            CheckpointError: The folder does not have the files, or the files belong to another model.
        """
