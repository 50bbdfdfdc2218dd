"""The trainer's side of a weight update: a stream of named tensors, in full or as the shards of this rank.

`WeightSource` has the methods of vLLM's class of the same name (metadata, and iteration over full tensors). Therefore
vLLM's own trainer engines can send a `WeightSource`. The additional method `shards` yields the part of each tensor on
this rank, for transports to which all ranks write at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class WeightMeta:
    """Description of one parameter.

    Attributes:
        name: Hugging Face name.
        dtype: dtype in which the parameter is sent.
        shape: shape of the full tensor.
        frozen: True if training never changes the parameter.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    frozen: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes."""
        return self.numel * self.dtype.itemsize


class WeightSource(Protocol):
    """Weights of the policy. The source can be iterated many times; all ranks iterate in the same order."""

    def metadata(self) -> list[WeightMeta]:
        """Return the descriptions of the tensors in the order of iteration, without moving data."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors, gathered layer by layer. Collective: every rank must iterate to the end."""

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield `(name, first element, flat part)` of each tensor part on this rank.

        The parts of all ranks cover each tensor exactly once. Tensor parallelism and adapters make the iteration
        collective: every rank must iterate to the end.
        """


@runtime_checkable
class AdaptedWeightSource(WeightSource, Protocol):
    """Weights of a policy with an adapter. The adapter is also available alone."""

    def check_adapter(self) -> None:
        """Check that a rollout engine can apply the adapter to the weights in the folder of the model.

        Raises:
            ConfigError: the engine would sample from another policy.
        """

    def adapter_files(self) -> dict[str, bytes]:
        """Return peft's files of the adapter, by name; empty on all ranks but rank 0. Collective."""


class ModuleWeightSource:
    """Weights of a module, complete on every rank. Ranks share the copying evenly."""

    def __init__(self, module: torch.nn.Module, rank: int = 0, world_size: int = 1) -> None:
        self._module, self._rank, self._world_size = module, rank, world_size

    def metadata(self) -> list[WeightMeta]:
        """Return names, dtypes and shapes of the parameters; tied parameters appear once."""
        return [WeightMeta(name, p.dtype, tuple(p.shape)) for name, p in self._module.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters without a copy."""
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach()

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield this rank's slice of each flattened parameter."""
        for name, parameter in self._module.named_parameters():
            flat = parameter.detach().view(-1)
            size = -(-flat.numel() // self._world_size)
            start = min(self._rank * size, flat.numel())
            yield name, start, flat[start : start + size]


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this process in a mesh, for collectives. Shards may be in host memory."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def full_tensor(tensor: DTensor) -> Tensor:
    """Return the whole tensor on the device of this process. Collective."""
    on_device: Any = tensor.detach().to(device_of(tensor.device_mesh))
    whole: Tensor = on_device.full_tensor()
    return whole
