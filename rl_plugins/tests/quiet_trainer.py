"""A trainer without loggers, files and a progress bar, for tests and benchmarks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.connectors import callback_connector

_FLAGS: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    # Each rank has batches of its own.
    "use_distributed_sampler": False,
}


def quiet_trainer(strategy: Any, **options: Any) -> Trainer:
    """Return a trainer of one epoch.

    Args:
        strategy: strategy of the trainer.
        **options: arguments of the trainer. They replace the flags of a quiet trainer.
    """
    # Lightning would look for callbacks in the metadata of every installed package, for each trainer.
    with patch.object(callback_connector, "_load_external_callbacks", return_value=[]):
        return Trainer(strategy=strategy, **(_FLAGS | options))


def precision_flags(precision: Any, device: str = "cpu") -> dict[str, Any]:
    """Return the flags of a trainer for a precision. Lightning refuses `16-mixed` for FSDP2, and replaces it on CPU."""
    return {"plugins": MixedPrecision(precision, device)} if precision == "16-mixed" else {"precision": precision}
