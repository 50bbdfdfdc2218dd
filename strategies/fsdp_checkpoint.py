"""Checkpoint folder of one FSDP2 model, in PyTorch's distributed format. Any number of ranks can read the folder.

Each rank writes its shards once. A reading rank reads only the needed parts of the files. Optimizer states are saved
by parameter name, if a step has created the states.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from rl_plugins.errors import CheckpointError
from rl_plugins.models.lora import has_adapter

_METADATA_FILE = ".metadata"


def save_model(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Write the weights of a model, and the optimizer states if an optimizer is given. Collective."""
    state: dict[str, Any] = {"weights": _weights(model)}
    if optimizer is not None:
        names = _names(model, optimizer)
        kept = optimizer.state_dict()
        state["states"] = {names[index]: dict(values) for index, values in kept["state"].items()}
        state["groups"] = {str(index): group for index, group in enumerate(kept["param_groups"])}
    dcp.save(state, checkpoint_id=folder)


def load_model(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Read a folder of `save_model`, written with any number of ranks. Collective.

    Raises:
        CheckpointError: a part is missing, or the weights belong to another model.
    """
    saved = _read_metadata(folder).state_dict_metadata
    weights = _weights(model)
    for name, tensor in weights.items():
        stored = saved.get(f"weights.{name}")
        if not isinstance(stored, TensorStorageMetadata) or stored.size != tensor.shape:
            raise CheckpointError(
                f"{folder} belongs to another model: {name} is missing or has another shape. Resume with the model of "
                "the checkpoint"
            )
    state: dict[str, Any] = {"weights": weights}
    if optimizer is not None:
        names = _names(model, optimizer)
        state["states"] = _empty_states(saved, dict(model.named_parameters()))
        state["groups"] = {str(index): {} for index in range(len(optimizer.param_groups))}
        for key in saved:
            if key.startswith("groups."):
                _, index, option = key.split(".", maxsplit=2)
                state["groups"].setdefault(index, {})[option] = None
    dcp.load(state, checkpoint_id=folder)
    if optimizer is not None:
        indices = {name: index for index, name in enumerate(names)}
        optimizer.load_state_dict(
            {
                "state": {indices[name]: values for name, values in state["states"].items()},
                "param_groups": [state["groups"][str(index)] for index in range(len(optimizer.param_groups))],
            }
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the whole weights of a model, read by this process alone.

    Raises:
        CheckpointError: a part is missing.
    """
    saved = _read_metadata(folder).state_dict_metadata
    weights = {
        key.removeprefix("weights."): torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in saved.items()
        if key.startswith("weights.") and isinstance(stored, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # Reading without the other ranks is intended.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load({"weights": weights}, checkpoint_id=folder, no_dist=True)
    return weights


def is_model_folder(folder: Path) -> bool:
    """Return True if the folder holds a completely written model."""
    return (folder / _METADATA_FILE).is_file()


def _read_metadata(folder: Path) -> Metadata:
    if not is_model_folder(folder):
        raise CheckpointError(
            f"{folder} holds no shards of model {folder.name!r}, or the shards of another strategy: resume with the "
            "strategy of the checkpoint, or from another checkpoint"
        )
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for part in sorted({part.relative_path for part in metadata.storage_data.values()}):
        if not (folder / part).is_file():
            raise CheckpointError(f"{folder} is incomplete: {part} is missing. Resume from another checkpoint")
    return metadata


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return saved tensors of a model: buffers, and parameters (with an adapter, trained ones only; tied ones once)."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad or not has_adapter(model)}
    parameters = {name: parameter.detach() for name, parameter in named.items()}
    buffers = dict(model.named_buffers())
    return parameters | {name: buffers[name] for name in model.state_dict() if name in buffers}


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the name of each parameter, in the order of the optimizer's indices."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _empty_states(saved: dict[str, Any], parameters: dict[str, nn.Parameter]) -> dict[str, dict[str, Any]]:
    """Return empty optimizer states to load into. A state of the same shape as a parameter has the same sharding."""
    states: dict[str, dict[str, Any]] = {}
    for key, stored in saved.items():
        if not key.startswith("states."):
            continue
        name, _, field = key.removeprefix("states.").rpartition(".")
        empty: Any = None
        if isinstance(stored, TensorStorageMetadata):
            dtype = stored.properties.dtype
            same_shape = stored.size == parameters[name].shape
            empty = (
                torch.zeros_like(parameters[name], dtype=dtype) if same_shape else torch.zeros(stored.size, dtype=dtype)
            )
        states.setdefault(name, {})[field] = empty
    return states
