"""Copies of tensors from the host to the device of a model, without a wait for a GPU."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

Copied = TypeVar("Copied")


def to_device(values: Copied, device: torch.device | str) -> Copied:
    """Copy a tensor, or all tensors of samples, to a device.

    On a GPU, a plain copy from the host waits for the end of all earlier work, and the GPU is then idle until the host
    has more work. A copy from pinned memory joins the queue of the GPU, and the host goes on.
    """
    tensors: Any = values
    device, before = torch.device(device), tensors.device
    is_on_gpu = before is not None and before.type == "cuda"
    copied: Copied
    if device.type != "cuda" or is_on_gpu:
        copied = tensors.to(device)
    else:
        copied = tensors.pin_memory().to(device, non_blocking=True)
    return copied
