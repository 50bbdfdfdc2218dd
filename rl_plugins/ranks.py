"""Communication between the training ranks.

Tensors move between the devices of the ranks. Flags, objects and waits move between the hosts: NCCL would wait in a
kernel, which occupies the GPU of the rank while a rollout engine works on this GPU.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rl_plugins.addresses import choose_gloo_interface

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch import Tensor

T = TypeVar("T")

# The default group of the process when the group of the hosts was made, and the group of the hosts.
_hosts: tuple[object, Any] | None = None


@dataclass(frozen=True)
class Ranks:
    """This process among the training ranks.

    Every method is collective: all ranks call the same methods in the same order.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of training ranks.
        device: device of communicated tensors; None for a process without other ranks.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device | None = None

    def sum(self, values: Tensor) -> Tensor:
        """Add up a small tensor over all ranks, element by element, in float64."""
        return self._all_reduce(values, "SUM")

    def max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum of a small tensor over all ranks, in float64."""
        return self._all_reduce(values, "MAX")

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on at least one rank."""
        import torch

        if self.device is None or not _has_process_group():
            return flag
        hosts = _group_of_hosts()
        flags = torch.tensor([int(flag)], device=self.device if hosts is None else "cpu")
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=hosts)
        return bool(flags.item())

    def wait(self) -> None:
        """Wait until all ranks have come here."""
        self.any(False)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        return [value] if self.device is None else gather(value)

    def exchange(self, parcels: list[T]) -> list[T]:
        """Send `parcels[i]` to rank i; return the parcels for this rank, in the order of the senders.

        The parcel of this rank for itself is not copied.
        """
        if self.world_size == 1 or self.device is None:
            return list(parcels)
        import torch

        packed = [b"" if rank == self.rank else pickle.dumps(parcel) for rank, parcel in enumerate(parcels)]
        sizes = torch.tensor([len(parcel) for parcel in packed], device=self.device)
        received_sizes = torch.empty_like(sizes)
        torch.distributed.all_to_all_single(received_sizes, sizes)
        sent = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
        received = torch.empty(int(received_sizes.sum()), dtype=torch.uint8, device=self.device)
        torch.distributed.all_to_all_single(received, sent.to(self.device), received_sizes.tolist(), sizes.tolist())
        parts = received.cpu().split(received_sizes.tolist())
        return [
            parcels[rank] if rank == self.rank else pickle.loads(part.numpy().tobytes())
            for rank, part in enumerate(parts)
        ]

    def _all_reduce(self, values: Tensor, operation: str) -> Tensor:
        import torch

        if self.device is None or not _has_process_group():
            return values
        reduced = values.to(device=self.device, dtype=torch.float64, copy=True)
        torch.distributed.all_reduce(reduced, op=getattr(torch.distributed.ReduceOp, operation))
        return reduced.to(values.device)


def connected_ranks(rank: int, world_size: int, device: torch.device, timeout: timedelta | None) -> Ranks:
    """Return this rank. If the default group is over NCCL, also make a group of the hosts over gloo, once. Collective.

    Args:
        rank: number of this process, from 0.
        world_size: number of training ranks.
        device: device of communicated tensors.
        timeout: deadline of each wait on the hosts; None: the default of torch.

    Raises:
        ConfigError: this machine has no network interface that `NCCL_SOCKET_IFNAME` allows.
    """
    global _hosts
    import torch

    if _has_process_group() and "nccl" in torch.distributed.get_backend() and _group_of_hosts() is None:
        choose_gloo_interface()
        _hosts = torch.distributed.group.WORLD, torch.distributed.new_group(backend="gloo", timeout=timeout)
    return Ranks(rank, world_size, device)


def set_default_deadline(timeout: timedelta | None) -> None:
    """Give groups of ranks without a deadline of their own this deadline. Libraries make such groups.

    Args:
        timeout: deadline of each wait; None: the default of torch.
    """
    from torch.distributed import distributed_c10d

    if timeout is not None:
        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout


def place() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks. Without a process group, return 0 and 1."""
    import torch

    if not _has_process_group():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def barrier() -> None:
    """Wait for all ranks of the process group; return at once in a process without a group."""
    import torch

    if _has_process_group():
        torch.distributed.barrier(group=_group_of_hosts())


def broadcast(value: T, source: int = 0) -> T:
    """Return the value of rank `source`. Without a process group, return the argument."""
    import torch

    if not _has_process_group():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=source, group=_group_of_hosts())
    return box[0]


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks. Without a process group, return only the argument."""
    import torch

    if not _has_process_group():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value, group=_group_of_hosts())
    return values


def _group_of_hosts() -> Any:
    """Return the group of the hosts; None for the default group."""
    import torch

    return _hosts[1] if _hosts is not None and _hosts[0] is torch.distributed.group.WORLD else None


def _has_process_group() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()
