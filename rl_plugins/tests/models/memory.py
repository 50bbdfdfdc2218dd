"""Memory requested by an operation, measured in the dispatcher of torch, and small chunks and blocks of logits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_plugins.models.token_distributions import LogitsAtOnce


class LargestNewTensor(TorchDispatchMode):
    """Record the largest number of elements, per dtype, of any tensor with its own memory made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
                self.elements[result.dtype] = max(self.elements.get(result.dtype, 0), result.numel())
        return results


class LargestMemory(TorchDispatchMode):
    """Record the largest memory at once, in bytes, of all tensors made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, storage._cdata)
                    self.bytes = max(self.bytes, sum(self._sizes.values()))
        return results


def at_once(elements: int) -> Callable[[torch.device], LogitsAtOnce]:
    """Return a `logits_at_once` with chunks and blocks of a size, on every device."""
    return lambda device: LogitsAtOnce(elements, elements)
