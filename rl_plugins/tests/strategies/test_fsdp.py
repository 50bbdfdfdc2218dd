"""FSDP2 over gloo: what two ranks train is what one device trains, and their checkpoint serves any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from rl_plugins.launch.export import export_checkpoint
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.strategies.fsdp import blocks
from rl_plugins.strategies.host_memory import HostMemory
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import fsdp_worker


def test_two_ranks_train_as_one_device_does(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_worker.SIZES)
    (((first, *_), expected), _), _ = run_ranks(fsdp_worker.train, tmp_path)
    run_ranks(fsdp_worker.go_on_alone, tmp_path, expected, world_size=1)
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported", model=str(tmp_path / "policy"))
    exported, trained = load_file(tmp_path / "exported" / "model.safetensors"), first[0]
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in trained.items())


def test_blocks_are_those_of_transformers_or_the_members_of_the_outermost_lists() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block()])
    assert blocks(model) == list(model.layers)
    model._no_split_modules = ["Linear"]  # type: ignore[assignment]
    linears = [expert for block in model.layers for expert in block.experts]  # type: ignore[union-attr]
    assert blocks(model) == linears[::-1]


def test_memory_on_the_host_comes_back_in_place() -> None:
    whole = torch.arange(6.0)
    part = whole[2:4]
    memory = HostMemory()
    memory.take([part, whole])
    assert whole.untyped_storage().nbytes() == 0
    memory.give_back()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    part.zero_()
    assert whole.tolist() == [0, 1, 0, 0, 4, 5]
    memory.give_back()
    assert whole.tolist() == [0, 1, 0, 0, 4, 5]
