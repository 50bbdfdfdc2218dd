"""Tensors whose memory is on the host for a while: the tensors stay, and so does everything that refers to them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostMemory:
    """Holds what was taken from the device until it is given back."""

    def __init__(self) -> None:
        self._taken: list[tuple[torch.UntypedStorage, Tensor]] = []

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy what is behind the tensors to the host, and free it; of sharded ones, this rank's part.

        Until it is given back, nobody may read or write them.
        """
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            # What several tensors share is empty after the first.
            if storage.nbytes():
                self._taken.append((storage, _bytes_of(storage).to("cpu", copy=True)))
                storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def give_back(self) -> None:
        """Bring everything back to where it was."""
        while self._taken:
            storage, copy = self._taken.pop()
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
