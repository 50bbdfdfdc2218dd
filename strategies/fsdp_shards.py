"""Shards of an FSDP2 model: taken from the whole model of rank 0, and kept in the folder of a checkpoint.

A model is cut and sharded on the device `meta`, that is without weights. Then rank 0 sends one whole tensor after the
other, and each rank copies its shard. So all ranks together need the host memory of one model, and each device the
memory of its shards and of one tensor.

The folder of a checkpoint has PyTorch's distributed format, and any number of ranks can read the folder. Each rank
writes its shards once. A reading rank reads only the needed parts of the files. Optimizer states are saved by parameter
name, if a step has created the states.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from typing_extensions import override

from rl_plugins.errors import CheckpointError
from rl_plugins.manifest import CheckpointWriter
from rl_plugins.models.lora import has_adapter
from rl_plugins.strategies.optimizers import library_of

_METADATA_FILE = ".metadata"
_WEIGHTS = "weights."
"""Beginning of the names of weights in a checkpoint."""
_DESCRIPTION = {
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}  # fmt: skip
"""Module and name of each class in PyTorch's description of a checkpoint."""


# The whole model of rank 0 ----------------------------------------------------------------------------------------


def take_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Move a model to the device `meta`, and return its parameters and buffers by name. Tied parameters stay tied."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty: dict[int, Tensor] = {}
    for tensor in tensors.values():
        on_meta = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        empty[id(tensor)] = nn.Parameter(on_meta, tensor.requires_grad) if is_parameter else on_meta
    for module in list(model.modules()):
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            setattr(module, name, empty[id(tensor)])
    return {name: tensor.detach() for name, tensor in tensors.items()}


@torch.no_grad()
def send_shards(model: nn.Module, whole: dict[str, Tensor], device: torch.device, *, on_host: bool = False) -> None:
    """Give every rank its shards of the tensors of rank 0. Collective.

    Args:
        model: model on the device `meta`, sharded by `fully_shard`.
        whole: on rank 0, all tensors by name, removed when they are sent; empty on the other ranks.
        device: device of the shards, of buffers and of the sent tensors.
        on_host: keep the shards in host memory.
    """
    is_source = bool(whole)
    model.to_empty(device="cpu" if on_host else device)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_source:
            sent = whole.pop(name).to(device=device, dtype=tensor.dtype).contiguous()
        else:
            sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        torch.distributed.broadcast(sent, src=0)
        if isinstance(tensor, DTensor):
            part = distribute_tensor(sent, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(part.to_local())
        else:
            module, _, buffer = name.rpartition(".")
            setattr(model.get_submodule(module), buffer, sent)


# The folder of a checkpoint ---------------------------------------------------------------------------------------


def save_model(writer: CheckpointWriter, folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Write the weights of a model, and the optimizer states if an optimizer is given. Collective."""
    state: dict[str, Any] = {"weights": _weights(model)}
    if optimizer is not None:
        names = _names(model, optimizer)
        kept = optimizer.state_dict()
        state["states"] = {names[index]: dict(values) for index, values in kept["state"].items()}
        state["groups"] = {str(index): group for index, group in enumerate(kept["param_groups"])}
    # `CheckpointWriter` waits for the disk by itself.
    storage = _RepeatableWriter(folder, sync_files=False)
    storage.fs = _HashingFiles(writer)
    dcp.save(state, storage_writer=storage)


def load_model(folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Read a folder of `save_model`, written with any number of ranks. Collective.

    Raises:
        CheckpointError: a part is missing, or the weights belong to another model.
    """
    saved = _read_metadata(folder).state_dict_metadata
    weights = _weights(model)
    for name in sorted({key.removeprefix(_WEIGHTS) for key in saved if key.startswith(_WEIGHTS)} | weights.keys()):
        stored, tensor = saved.get(f"{_WEIGHTS}{name}"), weights.get(name)
        if not isinstance(stored, TensorStorageMetadata) or tensor is None or stored.size != tensor.shape:
            raise CheckpointError(
                f"{folder} belongs to another model: {name} is in one of the two, or has two shapes: resume with the "
                "model of the checkpoint"
            )
    state: dict[str, Any] = {"weights": weights}
    if optimizer is not None:
        names = _names(model, optimizer)
        if library_of(optimizer) == "torchao" and any(key.startswith("states.") for key in saved):
            state["states"] = _first_states(optimizer, names)
        else:
            state["states"] = _empty_states(saved, dict(model.named_parameters()))
        state["groups"] = {str(index): {} for index in range(len(optimizer.param_groups))}
        for key, stored in saved.items():
            if key.startswith("groups."):
                _, index, option = key.split(".", maxsplit=2)
                empty = None
                if isinstance(stored, TensorStorageMetadata):
                    empty = torch.zeros(stored.size, dtype=stored.properties.dtype)
                state["groups"].setdefault(index, {})[option] = empty
    dcp.load(state, storage_reader=_PlainReader(folder), planner=_PlainPlanner())
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
        key.removeprefix(_WEIGHTS): torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in saved.items()
        if key.startswith(_WEIGHTS) and isinstance(stored, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # Reading without the other ranks is intended.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load({"weights": weights}, storage_reader=_PlainReader(folder), planner=_PlainPlanner(), no_dist=True)
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
    metadata = _PlainReader(folder).read_metadata()
    for part in sorted({part.relative_path for part in metadata.storage_data.values()}):
        if not (folder / part).is_file():
            raise CheckpointError(f"{folder} is incomplete: {part} is missing. Resume from another checkpoint")
    return metadata


class _HashingFiles(FileSystem):
    """Files whose digests are computed while PyTorch writes the files; see `CheckpointWriter` for errors."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open a new file."""
        with self._writer.create(Path(path)) as file:
            yield file

    @override
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder, and the folders above it."""
        self._writer.make_folder(Path(path))

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that is written."""
        self._writer.rename(Path(path), Path(new_path))


class _RepeatableWriter(dcp.FileSystemWriter):
    """Writes equal files for equal states. PyTorch's description would have the path and a random number."""

    @override
    def storage_meta(self) -> StorageMeta | None:
        """Return no path and no number."""
        return None


class _PlainReader(dcp.FileSystemReader):
    """Reads PyTorch's description of a checkpoint, which is a pickle, without any other class."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description."""
        file = Path(self.path) / _METADATA_FILE
        try:
            metadata = _DescriptionUnpickler(BytesIO(file.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} cannot be read as data ({error}): use another checkpoint") from None
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _DescriptionUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of PyTorch's description."""
        if (module, name) not in _DESCRIPTION:
            raise pickle.UnpicklingError(f"it holds code: {module}.{name}")
        return super().find_class(module, name)


class _PlainPlanner(dcp.DefaultLoadPlanner):
    """Reads values that are no tensors as data."""

    @override
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Put a value into the state."""
        plain = BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


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


def _first_states(optimizer: Optimizer, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the states that a step without gradients and learning rate makes, by parameter name.

    An 8-bit state has a class of torchao around its codes and scales, and only the optimizer makes the class.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return {names[index]: dict(values) for index, values in optimizer.state_dict()["state"].items()}
