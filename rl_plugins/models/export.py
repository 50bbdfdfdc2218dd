"""A trained policy as a Hugging Face folder: safetensors, config, generation config and tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import has_adapter
from rl_plugins.rollout.weights import WeightSource

if TYPE_CHECKING:
    from peft import PeftModel


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
    if has_adapter(model):
        model = model.get_base_model()
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
    dtype = next(iter(weights.values())).dtype
    model.config.dtype = dtype if isinstance(dtype, torch.dtype) else None
    with _appearing(folder) as partial:
        model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)


def save_adapter(model: PeftModel, weights: dict[str, Tensor], tokenizer: Any, folder: Path, is_writer: bool) -> None:
    """Write an adapter as peft does, for `PeftModel.from_pretrained`; atomic.

    Args:
        model: that has the adapter.
        weights: all that is trained, whole.
        tokenizer: saved beside them.
        folder: where; an older export there is replaced.
        is_writer: on one rank.
    """
    if is_writer:
        with _appearing(folder) as partial:
            model.save_pretrained(str(partial), state_dict=weights, save_embedding_layers=False)
            tokenizer.save_pretrained(partial)


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Where to write what `folder` is to hold; it gets its name, in place of an older one, when it is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
