"""Storages on their way to the host and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing._internal.two_tensor import TwoTensor

from rl_plugins.strategies.memory import HostMemory, TrainingMemory
from rl_plugins.tests.loops import for_each


@for_each("chunk_bytes", [1, 5, 24, 100])
def test_host_memory_gives_tensors_back_in_place(chunk_bytes: int) -> None:
    whole = torch.arange(6.0)
    part = whole[2:4]
    memory = HostMemory("cpu", chunk_bytes=chunk_bytes)
    assert memory.nbytes([part, whole, part]) == 24
    memory.move_to_host([part, whole])
    assert whole.untyped_storage().nbytes() == 0
    memory.move_back()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    part.zero_()
    assert whole.tolist() == [0, 1, 0, 0, 4, 5]
    memory.move_back()
    assert whole.tolist() == [0, 1, 0, 0, 4, 5]


def test_host_memory_frees_tensors_of_zeros_without_a_copy() -> None:
    weights, gradients = torch.arange(4.0), torch.zeros(6)
    memory = HostMemory("cpu", chunk_bytes=16)
    for _ in range(2):
        memory.move_to_host([weights], zeros=[gradients])
        assert weights.untyped_storage().nbytes() == gradients.untyped_storage().nbytes() == 0
        memory.move_back()
        assert weights.tolist() == [0, 1, 2, 3] and gradients.tolist() == [0] * 6
        assert len(memory._chunks) == 1


def test_host_memory_takes_the_parts_of_quantised_tensors() -> None:
    """Codes and scales of an 8-bit optimizer state are in a tensor without storage."""
    codes, scales = torch.arange(4.0), torch.ones(4)
    memory = HostMemory("cpu")
    memory.move_to_host([TwoTensor(codes, scales)])
    assert codes.untyped_storage().nbytes() == scales.untyped_storage().nbytes() == 0
    memory.move_back()
    assert codes.tolist() == [0, 1, 2, 3] and scales.tolist() == [1, 1, 1, 1]


def test_host_memory_leaves_tensors_of_memory_mapped_files_in_place(tmp_path: Path) -> None:
    """Frozen models on the CPU have such weights under stages 1 and 2 of ZeRO."""
    save_file({"weight": torch.arange(4.0)}, tmp_path / "model.safetensors")
    mapped = load_file(tmp_path / "model.safetensors")["weight"]
    own, memory = torch.arange(3.0), HostMemory("cpu")
    assert memory.nbytes([mapped, own]) == own.nbytes
    memory.move_to_host([mapped, own])
    assert mapped.tolist() == [0, 1, 2, 3] and own.untyped_storage().nbytes() == 0
    memory.move_back()
    assert own.tolist() == [0, 1, 2]


def test_host_memory_uses_chunks_of_one_size_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch rounds other sizes of pinned memory up, and keeps unused memory."""
    sizes: list[int] = []
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("device") is None:
            sizes.append(size[0])
        return empty(*size, **options)

    memory = HostMemory("cpu", chunk_bytes=16)
    states, weights = [torch.ones(3), torch.arange(7.0)], [torch.arange(2.0)]
    monkeypatch.setattr(torch, "empty", counted)
    for steps in range(3):
        memory.move_to_host(states)
        memory.move_to_host(weights)
        assert memory.nbytes([*states, *weights]) == 0
        memory.move_back()
        assert states[1].tolist() == [steps, 1, 2, 3, 4, 5, 6] and weights[0].tolist() == [0, 1]
        states[1][0] += 1
    # 48 bytes.
    assert sizes == [16] * 3


@for_each(("device", "pinned"), [("cuda", True), ("cpu", False)])
def test_host_memory_is_pinned_for_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str, pinned: bool) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def recorded(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if options.get("device") is None:
            asked.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", recorded)
    memory = HostMemory(device, chunk_bytes=16)
    # The storages of a GPU.
    monkeypatch.setattr(memory, "_storages", lambda tensors: [tensor.untyped_storage() for tensor in tensors])
    memory.move_to_host([torch.ones(3)])
    assert asked == [pinned]


@pytest.mark.parametrize(
    ("free", "share", "crowded", "emptied"),
    [
        # Of 100 bytes, 5 are spare.
        ([45], 0.4, False, 0),
        ([44, 45], 0.4, False, 1),
        ([44, 44], 0.4, True, 2),
        ([], None, True, 0),
    ],
)
def test_measure_room_compares_the_free_memory_with_the_engines_share(
    monkeypatch: pytest.MonkeyPatch, free: list[int], share: float | None, crowded: bool, emptied: int
) -> None:
    measured, calls = iter(free), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(measured), 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    memory = TrainingMemory()
    assert memory.crowded
    memory.measure_room(torch.device("cuda", 0), share)
    assert memory.crowded == crowded and len(calls) == emptied
    # On CPU.
    memory.measure_room(torch.device("cpu"), share)
    assert memory.crowded


def test_release_unused_empties_the_cache_of_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    for device in ("cpu", "cuda"):
        TrainingMemory().release_unused(torch.device(device))
    assert calls == ["empty_cache"]


def test_host_memory_comes_back_on_a_separate_stream_after_the_present_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the current stream, only `wait` waits for the copies."""
    calls: list[str] = []

    class Stream:
        def __init__(self, name: str = "copies") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            calls.append(f"{self.name} wait for {other.name}")

    current = [Stream("current")]

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    copy = torch.Tensor.copy_

    def recorded(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        calls.append(f"copy on {current[-1].name}")
        return copy(self, source)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(torch.Tensor, "copy_", recorded)
    fakes: dict[str, Any] = {
        "is_initialized": lambda: True,
        "empty_cache": lambda: None,
        "synchronize": lambda: calls.append("synchronize"),
        "Stream": Stream,
        "stream": use,
        "current_stream": lambda: current[-1],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    memory = HostMemory("cuda")
    monkeypatch.setattr(memory, "_storages", lambda tensors: [tensor.untyped_storage() for tensor in tensors])
    states = torch.arange(3.0)
    memory.move_to_host([states])
    memory.move_back()
    assert calls == ["copy on current", "synchronize", "copies wait for current", "copy on copies"]
    calls.clear()
    memory.wait()
    assert calls == ["current wait for copies"] and states.tolist() == [0, 1, 2]
    memory.move_to_host([states])
    assert calls == ["current wait for copies"] * 2 + ["copy on current", "synchronize"]
