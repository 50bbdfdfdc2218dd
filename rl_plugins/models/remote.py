"""Models whose weights are not here, but whose numbers can be had: what functions over models ask of them.

One stands where a model would, as a module without parameters, so there is nothing of it to shard or train here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from rl_plugins.models.log_probs import ResponseLogProbs


class RemoteModel(nn.Module, ABC):
    """Computes elsewhere what the functions of the same names would compute with the model itself."""

    @abstractmethod
    def position_scores(self, **arguments: Any) -> Tensor:
        """`scalar_head.position_scores`."""

    @abstractmethod
    def response_log_probs(self, **arguments: Any) -> ResponseLogProbs:
        """`log_probs.response_log_probs`, without gradient."""


class RemoteLearner(RemoteModel):
    """One that is trained where it is, so that checkpoints must hold what it has become."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule; one rank asks for it."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Go on from what `save` has written; one rank asks for it.

        Raises:
            ConfigError: the folder does not hold it.
        """
