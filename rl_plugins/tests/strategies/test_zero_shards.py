"""Places of the elements of each parameter: all workers together have every parameter once, in memory or in files."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_plugins.errors import CheckpointError
from rl_plugins.plain_file import save_plain
from rl_plugins.strategies.zero_shards import SWAPPED, Stretch, ZeroShards, stretches_of_shapes, stretches_of_slices
from rl_plugins.tests.loops import for_each

SHAPES = [{"a": (3, 5), "b": (1,)}, {"c": (7,), "d": (4, 4), "e": ()}]


def partitions(workers: int) -> list[list[torch.Tensor]]:
    """The flat partitions of every worker under stages 1 and 2: each group cut in equal parts, numbered elements."""
    groups = []
    for index, group in enumerate(SHAPES):
        flat = torch.cat([torch.arange(math.prod(shape)) + 100 * i for i, shape in enumerate(group.values())])
        padded = torch.nn.functional.pad(flat + 1000 * index, (0, -len(flat) % workers), value=-1)
        groups.append(padded.chunk(workers))
    return [[group[worker] for group in groups] for worker in range(workers)]


def slices(workers: int) -> list[list[dict[str, Any]]]:
    """Return addresses in DeepSpeed's form."""
    mappings: list[list[dict[str, Any]]] = []
    for worker in range(workers):
        mapping = []
        for group in SHAPES:
            size = -(-sum(map(math.prod, group.values())) // workers)
            begin, offset, addresses = worker * size, 0, {}
            for name, shape in group.items():
                start, stop = max(offset, begin), min(offset + math.prod(shape), begin + size)
                if start < stop:
                    addresses[name] = SimpleNamespace(start=start - begin, numel=stop - start)
                offset += math.prod(shape)
            mapping.append(addresses)
        mappings.append(mapping)
    return mappings


def check_tiles(workers: list[list[Stretch]]) -> None:
    for group in SHAPES:
        for name, shape in group.items():
            spans = [(s.start, s.start + s.numel) for held in workers for s in held if s.name == name]
            assert [i for start, stop in spans for i in range(start, stop)] == list(range(math.prod(shape)))


@for_each("workers", [1, 2, 3, 4, 8])
def test_stretches_of_shapes_cut_each_parameter_under_stage_3(workers: int) -> None:
    held = stretches_of_shapes([{n: torch.Size(s) for n, s in group.items()} for group in SHAPES], workers)
    check_tiles(held)
    # One parameter after the other, each padded to equal parts.
    parts = [math.ceil(numel / workers) for numel in (15, 7, 16)]
    assert [s.offset for s in held[-1]] == [0, parts[0], 0, parts[1], parts[1] + parts[2]]


@for_each("workers", [1, 2, 3, 4, 8])
def test_stretches_of_slices_cut_whole_groups_under_stages_1_and_2(workers: int) -> None:
    held = stretches_of_slices(slices(workers))
    check_tiles(held)
    flat = partitions(workers)
    for worker, stretches in enumerate(held):
        for s in stretches:
            values = flat[worker][s.partition][s.offset : s.offset + s.numel]
            first = 1000 * s.partition + 100 * list(SHAPES[s.partition]).index(s.name) + s.start
            assert values.tolist() == list(range(first, first + s.numel))


def test_zero_shards_refuses_a_folder_without_shards(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="holds no shards of a model engine"):
        ZeroShards(tmp_path)


def save_shards(folder: Path, *masters: torch.Tensor) -> ZeroShards:
    """Write the shards of a policy of one parameter under stage 3, with a partition for each worker."""
    shards = folder / "policy" / "zero"
    shards.mkdir(parents=True)
    model = {"param_shapes": [{"a": torch.Size((4, 2))}], "module": {}, "buffer_names": [], "shared_params": {}}
    for rank, master in enumerate(masters):
        states: dict[str, Any] = {"state": {}, "param_groups": []}
        optimizer = {"zero_stage": 3, "optimizer_state_dict": states, "fp32_flat_groups": [master]}
        start = f"zero_pp_rank_{rank}_mp_rank_00"
        save_plain({"optimizer_state_dict": optimizer}, shards / f"{start}_optim_states.pt")
        save_plain(model, shards / f"{start}_model_states.pt")
    return ZeroShards(shards)


def engine(master: torch.Tensor, *, nvme: bool, stage: int = 3, bfloat16: bool = False) -> Any:
    """Stand-in of DeepSpeed's engine."""
    return SimpleNamespace(
        zero_nvme_offload_optimizer=lambda: nvme,
        zero_optimization_stage=lambda: stage,
        bfloat16_enabled=lambda: bfloat16,
        optimizer=SimpleNamespace(fp32_partitioned_groups_flat=[master], single_partition_of_fp32_groups=[master]),
    )


IN_FILE, IN_MEMORY = torch.empty(0), torch.zeros(4)


def test_check_place_wants_as_many_workers_with_files_for_states_in_files(tmp_path: Path) -> None:
    shards = save_shards(tmp_path, IN_FILE, IN_FILE)
    shards.check_place(engine(IN_FILE, nvme=True), 2)
    message = (
        r"states of 'policy' in the checkpoint are in files of as many workers \(offload to nvme\): resume with 2 "
        r"workers in the same precision, and with offload=\{'policy': 'nvme'\} "
        r"\(in a recipe: strategy\.offload\.policy=nvme\)"
    )
    for other, workers in (
        (engine(IN_FILE, nvme=True), 1),
        (engine(IN_MEMORY, nvme=False), 2),
        (engine(IN_MEMORY, nvme=False, stage=1), 2),
        (engine(IN_FILE, nvme=True, bfloat16=True), 2),
    ):
        with pytest.raises(CheckpointError, match=message):
            shards.check_place(other, workers)


def test_check_place_refuses_states_in_memory_for_an_engine_with_files(tmp_path: Path) -> None:
    shards = save_shards(tmp_path, IN_MEMORY, IN_MEMORY)
    for stage in (1, 2, 3):
        shards.check_place(engine(IN_MEMORY, nvme=False, stage=stage), 1)
    message = r"states of 'policy' in the checkpoint are not in files.*: resume with offload=\{'policy': 'cpu'\}"
    for master in (IN_FILE, IN_MEMORY):
        with pytest.raises(CheckpointError, match=message):
            shards.check_place(engine(master, nvme=True), 2)
    # Such a checkpoint is of a run with files whose groups of parameters were too small for a file.
    (tmp_path / "policy" / "zero" / SWAPPED).mkdir()
    shards.check_place(engine(IN_MEMORY, nvme=True), 2)
    with pytest.raises(CheckpointError, match=message):
        shards.check_place(engine(IN_FILE, nvme=True), 2)


def test_whole_weights_refuses_weights_in_files(tmp_path: Path) -> None:
    in_memory = save_shards(tmp_path / "memory", IN_MEMORY, IN_MEMORY)
    assert torch.equal(in_memory.whole_weights()["a"], torch.zeros(4, 2))
    message = r"the weights of 'policy' in .*zero are in files .*: resume with 2 workers .*policy=nvme\); at its end, "
    with pytest.raises(CheckpointError, match=message):
        save_shards(tmp_path / "files", IN_FILE, IN_FILE).whole_weights()
