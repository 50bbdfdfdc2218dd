"""engine_places and gpu_of_this_rank: the GPUs of an engine are the GPUs of its ranks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.air._internal.device_manager.nvidia_gpu import CUDATorchDeviceManager
from ray.train.v2._internal.callbacks.accelerators import _get_visible_accelerator_ids_per_worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from rl_plugins.errors import ConfigError, UserError
from rl_plugins.ranks import Ranks
from rl_plugins.rollout.vllm import fleet, gpu_binding
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.gpu_binding import RankGPU, engine_places, gpu_of_this_rank, lacking_room


def node(number: int) -> str:
    """Id of a machine, as Ray writes ids."""
    return f"{number + 1:056x}"


def ranks(nodes: int, gpus: int) -> list[RankGPU]:
    """Return ranks on full machines, one machine after the other."""
    return [RankGPU(node(number), str(gpu)) for number in range(nodes) for gpu in range(gpus)]


def engine(share: float, **arguments: int) -> VLLMConfig:
    """Return the settings of an engine with a share of a GPU, and with arguments of vLLM."""
    return VLLMConfig("model", device="cuda", gpu_memory_utilization=share, vllm=dict(arguments))


def seen(places: list[dict]) -> list[tuple[str, str]]:
    """Return the machine and the visible GPUs of each engine."""
    return [(place["scheduling_strategy"].node_id, place["environment"]["CUDA_VISIBLE_DEVICES"]) for place in places]


def test_engine_places_gives_each_engine_the_gpus_of_neighbouring_ranks_on_their_machine() -> None:
    assert seen(engine_places(ranks(2, 2), 1)) == [(node(0), "0"), (node(0), "1"), (node(1), "0"), (node(1), "1")]
    assert seen(engine_places(ranks(2, 4), 2)) == [
        (node(0), "0,1"), (node(0), "2,3"), (node(1), "0,1"), (node(1), "2,3"),
    ]  # fmt: skip
    uneven = [RankGPU(node(0), "GPU-7f"), RankGPU(node(0), "GPU-2c")]
    assert seen(engine_places(uneven, 2)) == [(node(0), "GPU-7f,GPU-2c")]
    for nodes in range(1, 9):
        for size in (1, 2, 4, 8):
            own = ranks(nodes, 8)
            together = [gpu for _, gpus in seen(engine_places(own, size)) for gpu in gpus.split(",")]
            assert together == [rank.gpu for rank in own], (nodes, size)


class Worker(SimpleNamespace):
    """A worker of Ray Train with the facts that Ray gives: the machine, and one GPU of the machine."""

    def __init__(self, machine: int, gpu: str) -> None:
        super().__init__(metadata=SimpleNamespace(node_id=node(machine), accelerator_ids={"GPU": [gpu]}))


@pytest.mark.parametrize("names", ["numbers", "uuids"])
@pytest.mark.parametrize(("machines", "gpus"), [(1, 1), (1, 8), (2, 8), (8, 8), (2, 16)])
def test_engine_places_is_beside_the_gpu_of_each_rank_of_ray_train(
    monkeypatch: pytest.MonkeyPatch, machines: int, gpus: int, names: str
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80, 80))
    uuids = [f"GPU-{number * 7 % 16:02x}" for number in range(gpus)]
    own = [str(gpu) if names == "numbers" else uuids[gpu] for gpu in range(gpus)]
    started: list[Any] = [Worker(machine, gpu) for machine in range(machines) for gpu in own]
    random.Random(0).shuffle(started)
    workers = WorkerGroup._sort_workers_by_gpu_id_grouped_by_node(started)
    visible = _get_visible_accelerator_ids_per_worker([worker.metadata for worker in workers], "GPU")
    found = []
    for worker, of_machine in zip(workers, visible, strict=True):
        (gpu,) = worker.metadata.accelerator_ids["GPU"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", of_machine)
        monkeypatch.setattr(ray, "get_gpu_ids", lambda gpu=gpu: [gpu])
        monkeypatch.setattr(
            ray, "get_runtime_context", lambda at=worker.metadata: SimpleNamespace(get_node_id=lambda: at.node_id)
        )
        (device,) = CUDATorchDeviceManager().get_devices()
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device.index)
        found.append(gpu_of_this_rank())
    of_ranks = [(worker.metadata.node_id, worker.metadata.accelerator_ids["GPU"][0]) for worker in workers]
    assert len(set(of_ranks)) == machines * gpus
    for size in (1, 2, 4, 8):
        if gpus % size == 0:
            of_engines = [(at, gpu) for at, shown in seen(engine_places(found, size)) for gpu in shown.split(",")]
            assert of_engines == of_ranks, size


def test_engine_places_reserves_nothing_and_stays_on_the_machine() -> None:
    (place,) = engine_places(ranks(1, 1), 1)
    assert (place["num_cpus"], place["num_gpus"], place["scheduling_strategy"].soft) == (0, 0, False)


@pytest.mark.parametrize(
    ("gpus", "size", "message"),
    [
        (ranks(1, 3), 2, "tensor_parallel_size=2 does not divide the 3 training workers"),
        (ranks(2, 3), 2, "training workers 2 to 3 are on several machines"),
        (ranks(1, 1) * 2, 1, "two training workers share a GPU"),
    ],
)
def test_engine_places_refuses_ranks_that_an_engine_cannot_have(gpus: list[RankGPU], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_places(gpus, size)


@pytest.mark.parametrize(("visible", "gpu"), [("5,3", "3"), ("GPU-7f,GPU-2c", "GPU-2c"), (None, "1")])
def test_gpu_of_this_rank_is_the_current_gpu_in_the_words_of_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: str
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70, 80))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_of_this_rank() == RankGPU("node", gpu)


def test_gpu_of_this_rank_waits_for_the_memory_of_a_process_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10, 20, 40, 60]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0), 80))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(gpu_binding, "_LOOK_AGAIN_S", 0.0)
    found = gpu_of_this_rank(engine(0.5))
    assert (found.free_bytes, found.total_bytes, free) == (40, 80, [60])
    assert gpu_of_this_rank(engine(0.9), deadline_s=0.0).free_bytes == 60


def test_lacking_room_names_the_needed_and_the_free_memory_of_a_gpu() -> None:
    gib = 2**30
    full, empty = RankGPU("a", "3", 12 * gib, 80 * gib), RankGPU("a", "4", 32 * gib, 80 * gib)
    assert lacking_room({4: empty}, engine(0.4)) == ""
    reason = lacking_room({4: empty, 3: full}, engine(0.4))
    assert "training worker 3 needs 32.0 of the 80.0 GiB of GPU 3, but" in reason and "leave 12.0 GiB free" in reason
    # A given KV cache is in place of the share.
    assert lacking_room({3: full}, engine(0.4, kv_cache_memory_bytes=12 * gib)) == ""
    reason = lacking_room({3: full}, engine(0.4, kv_cache_memory_bytes=13 * gib))
    setting = f"vllm.kv_cache_memory_bytes={13 * gib} (in a recipe: rollout.vllm.kv_cache_memory_bytes): "
    assert reason.startswith(setting) and "needs 13.0 of the 80.0" in reason


@pytest.mark.parametrize(("started", "error"), [(False, ConfigError), (True, RuntimeError)])
def test_start_on_gpus_of_raises_before_an_engine_starts_on_a_full_gpu(
    monkeypatch: pytest.MonkeyPatch, started: bool, error: type[Exception]
) -> None:
    monkeypatch.setattr(fleet, "gpu_of_this_rank", lambda config: RankGPU("0" * 56, "0", 1, 80))
    fleet_of_one = fleet.Fleet(VLLMConfig("model", device="cuda", gpu_memory_utilization=0.4), "name", 1, 0.0)
    fleet_of_one._started = started
    with pytest.raises(error, match="training worker 0 needs") as raised:
        fleet_of_one.start_on_gpus_of(Ranks())
    # A wrong option ends the run; after a loss, the workers start again.
    assert isinstance(raised.value, UserError) != started


def test_ray_restarts_no_engine_on_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine would not fit beside the memory of training: `start_on_gpus_of` starts the engine again."""
    asked: list[dict[str, Any]] = []

    class Actor:
        def options(self, **options: Any) -> Actor:
            asked.append(options)
            return self

        def remote(self, config: VLLMConfig) -> None:
            pass

    monkeypatch.setattr(ray, "remote", lambda actor: Actor())
    monkeypatch.setattr(fleet, "gpu_of_this_rank", lambda config: RankGPU(node(0), "0", 80, 80))
    monkeypatch.setattr(fleet.Fleet, "wait_until_ready", lambda self: None)
    monkeypatch.setattr(fleet.Fleet, "each", lambda self, method, among: None)
    fleet.Fleet(VLLMConfig("model", device="cuda"), "name", 1, 0.0).start_on_gpus_of(Ranks())
    fleet.Fleet(VLLMConfig("model", device="cuda", transport="nccl"), "name", 1, 1.0).start()
    assert [(options["num_gpus"], options["max_restarts"]) for options in asked] == [(0, 0), (1.0, -1)]
