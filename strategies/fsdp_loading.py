"""Weights of a model from rank 0 alone: the other ranks get their shards, and never hold the model.

A model is cut and sharded on the device `meta`, that is without weights. Then rank 0 sends one whole tensor after the
other, and each rank copies its shard. So all ranks together need the host memory of one model, and each device the
memory of its shards and of one tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


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
def deal_tensors(model: nn.Module, whole: dict[str, Tensor], device: torch.device, *, on_host: bool = False) -> None:
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
