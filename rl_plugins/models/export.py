"""A trained policy as a Hugging Face folder: safetensors, config, generation config and tokenizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_plugins.errors import ConfigError
from rl_plugins.rollout.weights import WeightSource


def save_policy(model: Any, source: WeightSource, tokenizer: Any, folder: Path, is_writer: bool) -> None:
    """Gather the weights layer by layer and write them; the folder appears when it is complete. Collective.

    Args:
        model: the (possibly sharded) transformers model, for its config and its way of saving.
        source: its weights.
        tokenizer: saved beside them.
        folder: where; an older export there is replaced.
        is_writer: on one rank; it holds a full copy in host memory.

    Raises:
        ConfigError: the model cannot save itself in Hugging Face format.
    """
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(f"{type(model).__name__} has no save_pretrained: only transformers models can be exported")
    weights: dict[str, Tensor] = {}
    for name, tensor in source:
        if is_writer:
            weights[name] = tensor.detach().to("cpu", copy=True)
    if is_writer:
        write_policy(model, weights, tokenizer, folder)


def write_policy(model: Any, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
    """Write whole weights with the model's config and a tokenizer; atomic."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    dtype = next(iter(weights.values())).dtype
    model.config.dtype = dtype if isinstance(dtype, torch.dtype) else None
    model.save_pretrained(partial, state_dict=weights)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
