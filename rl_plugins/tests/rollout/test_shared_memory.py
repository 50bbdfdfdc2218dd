"""Weights through shared memory, both sides in one process: what arrives is what was sent, bit for bit."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.rollout.shared_memory import (
    SHARED_MEMORY,
    SharedMemorySender,
    open_halves,
    plan_buckets,
    read_tensors,
)
from rl_plugins.rollout.weights import ModuleWeightSource, WeightMeta

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "scalar": ((), torch.float32),
    "one": ((1,), torch.bfloat16),
    "odd": ((7, 13), torch.bfloat16),
    "three_bytes": ((3,), torch.uint8),
    "wide": ((5, 3), torch.float64),
    "nothing": ((0, 4), torch.float32),
    "larger_than_the_bucket": ((70, 50), torch.float32),
    "narrow": ((33,), torch.float16),
    "row": ((1, 129), torch.float32),
    "last": ((64, 2), torch.bfloat16),
}


def module(seed: int) -> torch.nn.Module:
    """Parameters of many sizes and dtypes, all their bits random."""
    generator = torch.Generator().manual_seed(seed)
    result = torch.nn.Module()
    for name, (shape, dtype) in SHAPES.items():
        count = WeightMeta(name, dtype, shape).nbytes
        bits = torch.randint(256, (count,), dtype=torch.uint8, generator=generator)
        parameter = torch.nn.Parameter(bits.view(dtype).view(shape), requires_grad=False)
        result.register_parameter(name, parameter)
    return result


def bits(tensor: Tensor) -> list[int]:
    return tensor.detach().reshape(-1).view(torch.uint8).tolist()


class Receiver:
    """The engine's side: copies what is announced, as late as it may."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.calls: list[str] = []

    def init(self, init_info: dict[str, Any]) -> None:
        assert set(init_info) == {"paths", "half_bytes"}
        self.halves = open_halves(**init_info)
        self.paths = init_info["paths"]
        assert all(os.path.getsize(path) == init_info["half_bytes"] for path in self.paths)

    def start(self) -> None:
        self.calls.append("start")
        self.weights.clear()

    def update(self, update_info: dict[str, Any]) -> Callable[[], None]:
        self.calls.append("update")

        def load() -> None:
            tensors = read_tensors(self.halves[update_info["half"]], update_info["tensors"])
            self.weights.update({name: tensor.clone() for name, tensor in tensors})

        return load

    def finish(self, version: int) -> None:
        self.calls.append(f"finish {version}")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    def files() -> set[str]:
        return {path.name for path in Path(SHARED_MEMORY).glob("rl_plugins-weights-*")}

    before = files()
    yield
    assert files() <= before


def run_ranks(
    modules: list[torch.nn.Module], receiver: Receiver, bucket_bytes: int, change: Callable[[], None]
) -> list[SharedMemorySender]:
    """One thread per rank: build a sender, send, change the weights, send again."""
    world_size = len(modules)
    barrier = threading.Barrier(world_size, timeout=20)
    box: list[Any] = [None]

    def wait() -> None:
        barrier.wait()

    def rank_main(rank: int) -> SharedMemorySender:
        def broadcast(value: Any) -> Any:
            if rank == 0:
                box[0] = list(value)
            barrier.wait()
            return box[0]

        sender = SharedMemorySender(
            ModuleWeightSource(modules[rank], rank, world_size),
            rank=rank,
            barrier=wait,
            broadcast=broadcast,
            receiver=receiver if rank == 0 else None,
            bucket_bytes=bucket_bytes,
        )
        if rank == 0:
            assert not any(os.path.exists(path) for path in box[0])
        sender.send(1)
        if rank == 0:
            first_received.update(receiver.weights)
            change()
        barrier.wait()
        sender.send(2)
        return sender

    first_received: dict[str, Tensor] = {}
    with ThreadPoolExecutor(world_size) as pool:
        senders = list(pool.map(rank_main, range(world_size)))
    first = module(0)
    assert {n: bits(t) for n, t in first_received.items()} == {n: bits(p) for n, p in first.named_parameters()}
    return senders


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [2, 1000, 4096, 16_384, 2**20])
def test_received_weights_are_bit_equal(world_size: int, bucket_bytes: int) -> None:
    # Every rank trusts only its own part: elsewhere its copy is of other weights.
    modules = [module(0) for _ in range(world_size)]
    for rank, copy in enumerate(modules):
        _spoil_other_parts(copy, rank, world_size)
    receiver, second = Receiver(), module(1)

    def change() -> None:
        for copy in modules:
            for name, parameter in copy.named_parameters():
                parameter.copy_(second.get_parameter(name))

    senders = run_ranks(modules, receiver, bucket_bytes, change)
    received = {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in receiver.weights.items()}
    assert received == {n: (p.dtype, p.shape, bits(p)) for n, p in second.named_parameters()}
    assert list(received) == list(SHAPES)
    updates = receiver.calls.count("update") // 2
    assert receiver.calls == (["start"] + ["update"] * updates + ["finish 1"]) + (
        ["start"] + ["update"] * updates + ["finish 2"]
    )
    sizes = {sender.bucket_bytes for sender in senders}
    assert sizes == {2 * half.numel() for half in receiver.halves}
    largest = 70 * 50 * 4 + 64
    whole = sum(-(-WeightMeta("", d, s).nbytes // 64) * 64 for s, d in SHAPES.values())
    assert sizes == {2 * max(largest, min(bucket_bytes // 2, whole))}
    assert (updates == 1) == (bucket_bytes >= 2 * whole)


def _spoil_other_parts(copy: torch.nn.Module, rank: int, world_size: int) -> None:
    for name, start, part in list(ModuleWeightSource(copy, rank, world_size).shards()):
        flat = copy.get_parameter(name).view(-1)
        mine = part.clone()
        flat.view(torch.uint8).fill_(0xA5)
        flat[start : start + len(mine)] = mine


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shards_tile_every_parameter(world_size: int) -> None:
    whole = module(2)
    covered = {name: [0] * p.numel() for name, p in whole.named_parameters()}
    for rank in range(world_size):
        source = ModuleWeightSource(whole, rank, world_size)
        names = []
        for name, start, part in source.shards():
            names.append(name)
            for position in range(start, start + part.numel()):
                covered[name][position] += 1
        assert names == [meta.name for meta in source.metadata()] == [name for name, _ in source]
    assert all(count == 1 for counts in covered.values() for count in counts)


def test_buckets_hold_every_tensor_once_in_order_and_aligned() -> None:
    metadata = ModuleWeightSource(module(0)).metadata()
    for half_bytes in (14_080, 15_000, 2**20):
        buckets = plan_buckets(metadata, half_bytes)
        placed = [entry for bucket in buckets for entry in bucket.tensors.values()]
        assert [meta for meta, _ in placed] == metadata
        for bucket in buckets:
            end = 0
            for meta, offset in bucket.tensors.values():
                assert offset % 64 == 0 and offset >= end
                end = offset + meta.nbytes
            assert end <= half_bytes


@pytest.mark.parametrize("failing_file", [1, 2])
def test_full_shared_memory_is_a_clear_message(monkeypatch: pytest.MonkeyPatch, failing_file: int) -> None:
    calls = 0

    def full(descriptor: int, offset: int, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing_file:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"/dev/shm has no room for a weight bucket of \d+ MB.*bucket_mb") as error:
        SharedMemorySender(
            ModuleWeightSource(torch.nn.Linear(1000, 1000)),
            rank=0,
            barrier=lambda: None,
            broadcast=lambda value: value,
            receiver=Receiver(),
            bucket_bytes=2**20,
        )
    assert error.value.errno == errno.ENOSPC


def test_an_engine_that_fails_to_connect_leaves_no_files() -> None:
    class Broken(Receiver):
        def init(self, init_info: dict[str, Any]) -> None:
            raise TimeoutError("the engine did not answer")

    with pytest.raises(TimeoutError, match="did not answer"):
        SharedMemorySender(
            ModuleWeightSource(torch.nn.Linear(3, 3)),
            rank=0,
            barrier=lambda: None,
            broadcast=lambda value: value,
            receiver=Broken(),
        )
