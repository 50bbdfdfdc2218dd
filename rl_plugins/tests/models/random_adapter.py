"""Adapters with random weights, because a new adapter does not change the outputs."""

from __future__ import annotations

import peft
import torch


def with_random_adapter(model: peft.PeftModel, *, std: float = 0.1, seed: int = 1) -> peft.PeftModel:
    """Give the adapter of a model random weights, and return the model.

    Args:
        model: model with an adapter.
        std: standard deviation of the weights.
        seed: seed of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=std, generator=generator)
    return model
