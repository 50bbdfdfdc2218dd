"""engine_places and gpu_of_this_rank: the GPUs of an engine are the GPUs of its ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
import torch

from rl_plugins.errors import ConfigError
from rl_plugins.rollout.vllm.gpu_binding import RankGPU, engine_places, gpu_of_this_rank


def node(number: int) -> str:
    """Id of a machine, as Ray writes ids."""
    return f"{number + 1:056x}"


def ranks(nodes: int, gpus: int) -> list[RankGPU]:
    """Return ranks on full machines, one machine after the other."""
    return [RankGPU(node(number), str(gpu)) for number in range(nodes) for gpu in range(gpus)]


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
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_of_this_rank() == RankGPU("node", gpu)
