"""Tensors whose memory is on the host for a while: the tensors stay, and so does everything that refers to them.

It works on what is behind the tensors, so that it needs to know nothing of who shares it: flat buffers, views, shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostMemory:
    """Holds what was taken from a kind of device until it is given back.

    The room on the host is kept from one time to the next, pinned, so that copies run at the speed of the bus.

    Args:
        device_type: whose memory is taken; tensors that are elsewhere are left alone.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type
        self._taken: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._room: dict[int, list[Tensor]] = defaultdict(list)

    def nbytes(self, tensors: Iterable[Tensor]) -> int:
        """The memory of the device that `take` would free."""
        return sum(storage.nbytes() for storage in self._behind(tensors))

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy what is behind the tensors to the host, and free it; of sharded ones, this rank's part.

        Until it is given back, nobody may read or write them.
        """
        for storage in self._behind(tensors):
            copy = self._room_of(storage.nbytes())
            copy.copy_(_bytes_of(storage), non_blocking=True)
            self._taken.append((storage, copy))
        self._wait_for_copies()
        for storage, _ in self._taken:
            storage.resize_(0)
        if self._on_cuda:
            torch.cuda.empty_cache()

    def give_back(self) -> None:
        """Bring everything back to where it was."""
        while self._taken:
            storage, copy = self._taken.pop()
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
            self._room[copy.numel()].append(copy)
        self._wait_for_copies()

    @property
    def _on_cuda(self) -> bool:
        # A strategy on CPU has nothing on such a device, and PyTorch may have been built without.
        return self._device_type == "cuda" and torch.cuda.is_initialized()

    def _wait_for_copies(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()

    def _behind(self, tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
        """What is behind the tensors on the device, once each."""
        seen = set()
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.device.type == self._device_type and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage

    def _room_of(self, nbytes: int) -> Tensor:
        if self._room[nbytes]:
            return self._room[nbytes].pop()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device_type == "cuda")


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
