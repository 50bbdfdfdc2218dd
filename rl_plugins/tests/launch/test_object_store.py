"""Size of the object store of a run's own Ray."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from rl_plugins.launch.object_store import LEAST_BYTES, object_store_bytes
from rl_plugins.tests.launch.configurations import configured

LARGE = [
    "model.path=model", "batch.prompts_per_step=1024", "batch.samples_per_prompt=16", "data.max_prompt_tokens=1024",
    "sampling.max_tokens=8192",
]  # fmt: skip
SAMPLES = 1024 * 16 * (1024 + 8192)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a terabyte of memory."""
    machine = SimpleNamespace(available=2**40, free=2**40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(psutil, "disk_usage", lambda path: machine)
    return machine


def test_object_store_bytes_grow_with_the_samples_in_flight_and_the_pools() -> None:
    assert object_store_bytes(configured("grpo", "model.path=model")) == LEAST_BYTES
    size = object_store_bytes(configured("grpo", *LARGE))
    assert size == 32 * SAMPLES > 4 * 2**30
    assert object_store_bytes(configured("grpo", *LARGE, "schedule.max_staleness=1")) == 2 * size
    teacher = ["placement.teacher.actors=1", "teacher.path=model", "algorithm.teacher_top_k=10"]
    assert object_store_bytes(configured("grpo", *LARGE, *teacher)) == (32 + 48 + 12 * 10) * SAMPLES


def test_object_store_bytes_stay_within_the_memory_of_the_machine(machine: SimpleNamespace) -> None:
    machine.free = 2 * 2**30
    assert object_store_bytes(configured("grpo", *LARGE)) == int(0.8 * machine.free)
    machine.available = 2**30
    assert object_store_bytes(configured("grpo", *LARGE)) == LEAST_BYTES
