"""Blocks of a model: the layers that repeat. A strategy gathers the shards of one block at a time."""

from __future__ import annotations

from torch import nn


def named_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model of transformers, inner blocks first. Other models have none.

    The classes of the blocks are in `_no_split_modules`.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names][::-1]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return `named_blocks` of a model. For a model without such blocks, return the members of its outermost lists."""
    if named := named_blocks(model):
        return named
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    return [block for members in lists.values() for block in members]
