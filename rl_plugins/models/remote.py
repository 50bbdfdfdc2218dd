"""Base classes of models that run in other processes.

A remote model takes the place of a local model. The class is a module without parameters, so strategies have nothing to
shard or train.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from rl_plugins.models.log_probs import ResponseLogProbs


class RemoteModel(nn.Module, ABC):
    """Model in other processes. Each method returns the result of the function with the same name."""

    @abstractmethod
    def position_scores(self, **arguments: Any) -> Tensor:
        """Compute `scalar_head.position_scores` with the remote model."""

    @abstractmethod
    def response_log_probs(self, **arguments: Any) -> ResponseLogProbs:
        """Compute `log_probs.response_log_probs` with the remote model, without a gradient."""


class RemoteLearner(RemoteModel):
    """Remote model that is trained in its own processes. Checkpoints must include its state."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule. One rank calls this method."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load the files of `save`. One rank calls this method.

        Raises:
            ConfigError: The folder does not have the files.
        """
