"""Dropout of models whose log-probs are compared."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def turn_off_dropout(model: nn.Module) -> None:
    """Set all dropout probabilities of a model to 0, and its layer drop. The config of the model stays as it is.

    Evaluation mode would turn off gradient checkpointing, too: transformers checkpoints in train mode only.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        # transformers keeps the probabilities of attention and of functional dropout in attributes.
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
