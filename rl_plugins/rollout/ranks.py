"""What training ranks do together, without a strategy: nothing, in a process that is alone."""

from __future__ import annotations

from typing import Any


def barrier() -> None:
    """Wait for all ranks."""
    import torch

    if _distributed():
        torch.distributed.barrier()


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    import torch

    if not _distributed():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any) -> list[Any]:
    """The value of every rank, in their order, on every rank."""
    import torch

    if not _distributed():
        return [value]
    everyones: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, value)
    return everyones


def _distributed() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()
