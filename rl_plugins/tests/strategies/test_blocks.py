"""Tests of `rl_plugins.strategies.blocks`."""

from __future__ import annotations

from pathlib import Path

from deepspeed.utils import get_z3_leaf_modules
from torch import nn

from benchmarks.tiny_vision import save_tiny_vision
from rl_plugins.config.models import LoraConfig
from rl_plugins.models.lora import add_adapter
from rl_plugins.models.tiny import build_model
from rl_plugins.strategies.blocks import blocks, gather_by_block, named_blocks


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


def test_stage_3_gathers_each_block_of_a_decoder_at_once_and_keeps_the_layers_of_a_tower(tmp_path: Path) -> None:
    model = save_tiny_vision("llava", tmp_path)
    gather_by_block(model)
    assert get_z3_leaf_modules(model) == list(model.get_decoder().layers)
    with_adapter = add_adapter(save_tiny_vision("llava", tmp_path), LoraConfig(rank=2))
    gather_by_block(with_adapter)
    assert get_z3_leaf_modules(with_adapter) == list(with_adapter.get_decoder().layers)


def test_stage_3_keeps_the_layers_of_a_model_without_named_blocks() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    gather_by_block(model)
    assert get_z3_leaf_modules(model) == []


def test_second_engine_of_a_model_adds_no_hook() -> None:
    model = build_model()
    for _ in range(2):
        gather_by_block(model)
    assert [len(block._forward_pre_hooks) for block in blocks(model)] == [1] * len(blocks(model))
