"""Stage 3 gathers a block of a model at once.

By default DeepSpeed gathers each layer inside a block by itself. The hooks of all these layers take longer than the
kernels of a small model: `python -m benchmarks.zero_stages`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_plugins.models.blocks import named_blocks


def gather_by_block(model: nn.Module) -> None:
    """Let stage 3 gather and free the parameters of each block together.

    Args:
        model: model before the start of its DeepSpeed engine. A model without named blocks does not change.
    """
    import deepspeed

    for block in named_blocks(model):
        deepspeed.utils.set_z3_leaf_module(block, True)
        if any(parameter.requires_grad for parameter in block.parameters()):
            block.register_forward_pre_hook(_require_gradient)


def _require_gradient(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let the first argument of a block require a gradient.

    DeepSpeed frees the parameters of a block when the gradients of the block's inputs are ready. Without such an input
    (the first block over a frozen embedding), DeepSpeed would free them before the backward pass of the block.
    """
    hidden = arguments[0] if arguments else None
    if not isinstance(hidden, Tensor) or hidden.requires_grad or not torch.is_grad_enabled():
        return arguments
    return hidden.detach().requires_grad_(), *arguments[1:]
