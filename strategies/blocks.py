"""Blocks of a model: the layers that repeat. A strategy gathers the shards of one block at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def named_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model of transformers, inner blocks first. Other models have none.

    The names of the classes of blocks are in `_no_split_modules`.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 puts a class of its own in front of the class of a block.
    return [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}][::-1]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return `named_blocks` of a model. For a model without such blocks, return the members of its outermost lists."""
    if named := named_blocks(model):
        return named
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    return [block for members in lists.values() for block in members]


def gather_by_block(model: nn.Module) -> None:
    """Let ZeRO-3 gather and free the parameters of each named block of a decoder together.

    By default DeepSpeed gathers each layer inside a block by itself. The hooks of all these layers take time on the
    CPU: `python -m benchmarks.zero_stages` shows the tokens per second with whole blocks. And peft reads the weights of
    experts and of their adapter before the pass of the experts, so these need the whole block. A vision tower keeps the
    default, because models call parts of a tower with keyword arguments alone (Idefics3), or drop the output of the
    last block (LLaVA): DeepSpeed would free parameters too early, or keep gradients.

    Args:
        model: model before the start of its DeepSpeed engine. The model may have had an engine before.
    """
    import deepspeed

    named = set(named_blocks(model))
    # Only models of transformers have named blocks.
    decoder: nn.Module = model.get_decoder() if named else model  # type: ignore[operator]
    for block in named.intersection(decoder.modules()):
        deepspeed.utils.set_z3_leaf_module(block, True)
        is_trained = any(parameter.requires_grad for parameter in block.parameters())
        if is_trained and _require_gradient not in block._forward_pre_hooks.values():
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
