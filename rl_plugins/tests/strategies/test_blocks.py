"""Tests of `rl_plugins.strategies.blocks`."""

from __future__ import annotations

from torch import nn

from rl_plugins.strategies.blocks import blocks, named_blocks


def test_blocks_are_named_by_transformers_or_members_of_the_outermost_lists() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block()])
    assert blocks(model) == list(model.layers)
    assert named_blocks(model) == []
    model._no_split_modules = ["Linear"]  # type: ignore[assignment]
    linears = [expert for block in model.layers for expert in block.experts]  # type: ignore[union-attr]
    assert blocks(model) == named_blocks(model) == linears[::-1]
