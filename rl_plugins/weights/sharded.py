"""Sharded tensors of PyTorch (`DTensor`), gathered on the device of this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


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
