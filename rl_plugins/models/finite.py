"""Search for weights that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def not_finite(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the weights with a number that is NaN or infinite.

    The function reads each weight once, makes no copy of a weight, and waits for the device once. Integers, numbers of
    8 bits, and weights on the device `meta` are not read.

    Args:
        weights: names and weights, all on one device.
    """
    names, flags = list[str](), list[Tensor]()
    for name, weight in weights:
        is_read = weight.is_floating_point() and torch.finfo(weight.dtype).bits > 8
        if is_read and not weight.is_meta and weight.numel():
            names.append(name)
            # A NaN is both the lowest and the highest number.
            flags.append(torch.stack(weight.aminmax()).isfinite().all())
    if not flags:
        return []
    return [name for name, is_finite in zip(names, torch.stack(flags).tolist(), strict=True) if not is_finite]
