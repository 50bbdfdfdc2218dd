"""FSDP2 over gloo: what two ranks train is what one device trains, and their checkpoint serves any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.strategies.fsdp import blocks
from rl_plugins.strategies.host_memory import HostMemory
from rl_plugins.tests.strategies import fsdp_worker


def run_ranks(world_size: int, folder: Path) -> None:
    root = str(Path(__file__).parents[3])
    ranks = [
        subprocess.Popen(
            [sys.executable, fsdp_worker.__file__, str(rank), str(world_size), str(folder)],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": root, "LOCAL_RANK": str(rank)},
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=250)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert output.endswith("the checks are through\n")


@pytest.mark.slow
def test_two_ranks_train_as_one_device(tmp_path: Path) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_worker.SIZES)
    run_ranks(2, tmp_path)
    run_ranks(1, tmp_path)


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
