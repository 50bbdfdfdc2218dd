"""A model whose weights are not here, but whose numbers can be had: what functions over models ask of it.

It stands where a model would, as a module without parameters, so there is nothing of it to shard, train or save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
