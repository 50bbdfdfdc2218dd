"""The GRPO recipe on GPUs: strategies, precisions, sleep levels, and engines on one, on all and on other GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from integration_tests.conftest import Recipe
from integration_tests.gpu.whole import NEEDS_CUDA, STEPS, needs_two_gpus, train

pytestmark = NEEDS_CUDA

COLOCATED = {
    "zero3": [],
    "zero2": ["strategy.zero_stage=2"],
    "zero1": ["strategy.zero_stage=1"],
    "fsdp": ["strategy.name=fsdp"],
    "ahead": ["schedule.max_staleness=1"],
    "partial": ["schedule.max_staleness=1", "schedule.ahead=0.25", "rollout.sleep=all"],
}
GPUS = torch.cuda.device_count()
# Name to options, and the number of engines.
SEVERAL: dict[str, tuple[list[str], int]] = {
    "engine-per-gpu": ([f"placement.num_workers={GPUS}"], GPUS),
    "engine-per-gpu-fsdp": ([f"placement.num_workers={GPUS}", "strategy.name=fsdp"], GPUS),
    "engines-of-two-gpus": (
        [f"placement.num_workers={GPUS // 2 * 2}", "rollout.tensor_parallel_size=2"],
        GPUS // 2,
    ),
    "tensor-parallel": (["placement.num_workers=2", "strategy.name=fsdp", "strategy.tensor_parallel=2"], 2),
    "sequence-parallel": (["placement.num_workers=2", "strategy.sequence_parallel=2"], 2),
    "split": (["placement.num_workers=1", "placement.rollout=split"], 1),
}


def batch_for(workers: int) -> str:
    """Return the option of prompts for each worker."""
    return f"batch.prompts_per_step={8 * workers}"


@pytest.mark.parametrize("name", COLOCATED)
def test_colocated_engine_samples_from_the_trained_weights(start_recipe: Callable[..., Recipe], name: str) -> None:
    _, steps = train(start_recipe, name, "placement.num_workers=1", *COLOCATED[name])
    if name != "ahead":
        # Training frees memory while the engine samples, and the engine frees memory while training works.
        assert all(row["memory/rollout"] < row["memory/update_policy"] for row in steps)
        assert all(row["memory/engine_asleep"] < row["memory/engine_awake"] for row in steps)


def test_engine_in_float32_has_the_log_probs_of_the_policy(start_recipe: Callable[..., Recipe]) -> None:
    train(start_recipe, "float32", "placement.num_workers=1", precision="32-true")


def test_engine_frees_memory_in_every_step_with_each_level_of_sleep(start_recipe: Callable[..., Recipe]) -> None:
    for level, sleeps in (("kv_cache", STEPS), ("all", STEPS), ("none", 0)):
        _, steps = train(start_recipe, f"sleep-{level}", "placement.num_workers=1", f"rollout.sleep={level}")
        slept = [row for row in steps if "memory/engine_asleep" in row]
        # The run itself compares the freed bytes with the KV cache. vLLM releases cache and weights of the GPU at both
        # levels, and "kv_cache" keeps a copy of the weights in host memory: the numbers of two runs tell no level.
        assert len(slept) == sleeps, level
        assert all(row["memory/engine_asleep"] < row["memory/engine_awake"] for row in slept), level


@needs_two_gpus
@pytest.mark.parametrize("name", SEVERAL)
def test_several_gpus(start_recipe: Callable[..., Recipe], name: str) -> None:
    options, engines = SEVERAL[name]
    _, steps = train(start_recipe, name, batch_for(GPUS), *options)
    assert {row["rollout/engines"] for row in steps} == {engines}
