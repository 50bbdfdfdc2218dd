"""Dropout and random routers of models whose log-probs are compared."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def turn_off_dropout(model: nn.Module) -> None:
    """Set all dropout probabilities of a model to 0, and its layer drop. The config of the model stays as it is.

    Evaluation mode would turn off gradient checkpointing, too: transformers checkpoints in train mode only. Routers
    that choose experts at random in train mode, such as the routers of PhiMoE, stay in evaluation mode.
    """
    for module in list(model.modules()):
        if any("jitter" in name for name in vars(module)):
            module.train = partial(_evaluation_mode, module)  # type: ignore[method-assign]
            module.train()
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        # transformers keeps the probabilities of attention and of functional dropout in attributes.
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _evaluation_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """Stand in for `module.train`, which the model around the module calls in both directions."""
    return nn.Module.train(module, False)
