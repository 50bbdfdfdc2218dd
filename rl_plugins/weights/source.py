"""The training side of a weight update: a stream of named tensors, whole or in this rank's parts.

`WeightSource` has the shape of vLLM's class of the same name (metadata, and iteration over full tensors), so that
vLLM's own trainer engines can send it, plus `shards()`: the part of each tensor that this rank already holds, for
transports that all ranks can write to at once, without any gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightMeta:
    """One parameter: its Hugging Face name, the dtype sent, its full shape, and whether it never changes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    frozen: bool = False

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.numel * self.dtype.itemsize


class WeightSource(Protocol):
    """A re-iterable source of the policy's weights; every rank walks it in the same order."""

    def metadata(self) -> list[WeightMeta]:
        """What iteration yields, in that order, without moving data."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors, one layer gathered at a time. A collective: every rank must iterate to the end."""

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """`(name, offset, flat part)` that this rank holds; the parts of all ranks tile each tensor. No collective."""


@runtime_checkable
class AdaptedWeightSource(WeightSource, Protocol):
    """The weights of a policy that has an adapter, which can be had alone as well."""

    def adapter_files(self) -> dict[str, bytes]:
        """What peft saves of the adapter, by file name; empty on all ranks but the first. Collective."""


class ModuleWeightSource:
    """Weights of a module that every rank holds in full; ranks share the copying evenly."""

    def __init__(self, module: torch.nn.Module, rank: int = 0, world_size: int = 1) -> None:
        self._module, self._rank, self._world_size = module, rank, world_size

    def metadata(self) -> list[WeightMeta]:
        """Names, dtypes and shapes of the module's parameters; tied ones once."""
        return [WeightMeta(name, p.dtype, tuple(p.shape)) for name, p in self._module.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters themselves."""
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach()

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """This rank's slice of each flattened parameter."""
        for name, parameter in self._module.named_parameters():
            flat = parameter.detach().view(-1)
            size = -(-flat.numel() // self._world_size)
            start = min(self._rank * size, flat.numel())
            yield name, start, flat[start : start + size]
