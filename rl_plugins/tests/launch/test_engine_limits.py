"""Defaults of rollout engines follow from the device and the placement."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.tests.launch.configurations import configured

CPU = {
    "max_num_seqs": 256, "gpu_memory_utilization": 0.6, "bucket_mb": 64, "ready_timeout_s": 300.0,
    "stall_timeout_s": 120.0,
}  # fmt: skip
GPU = {
    "max_num_seqs": 1024, "gpu_memory_utilization": 0.6, "bucket_mb": 256, "ready_timeout_s": 900.0,
    "stall_timeout_s": 120.0,
}  # fmt: skip
OWN = {
    "max_num_seqs": 2, "gpu_memory_utilization": 0.7, "bucket_mb": 3, "ready_timeout_s": 4.0, "stall_timeout_s": 5.0,
}  # fmt: skip


def on(device: str, *options: str) -> RecipeConfig:
    return configured("grpo", "model.path=model", f"placement.device={device}", *options)


@pytest.mark.parametrize(
    ("device", "options", "limits"),
    [
        ("cpu", (), CPU),
        ("cuda", (), GPU),
        ("cuda", ("placement.rollout=split",), {**GPU, "gpu_memory_utilization": 0.9}),
        # Training or the engine keeps its memory while the other works.
        ("cuda", ("strategy.offload.policy=cpu",), {**GPU, "gpu_memory_utilization": 0.4}),
        ("cuda", ("rollout.sleep=none",), {**GPU, "gpu_memory_utilization": 0.4}),
        ("cuda", ("strategy.offload.critic=stay",), {**GPU, "gpu_memory_utilization": 0.4}),
        ("cuda", tuple(f"rollout.{name}={value}" for name, value in OWN.items()), OWN),
    ],
)
def test_engine_limits_are_the_options_or_the_defaults_of_the_device(
    device: str, options: tuple[str, ...], limits: dict[str, Any]
) -> None:
    assert on(device, *options).engine_limits == limits


@pytest.mark.parametrize(
    ("options", "share"),
    [
        (("algorithm.kl.coefficient=0.01",), 0.5),
        (("algorithm.kl.coefficient=0.01", "strategy.offload.reference=while_sampling"), 0.6),
        (("algorithm.kl.coefficient=0.01", "strategy.offload.reference=cpu"), 0.6),
        (("algorithm.kl.coefficient=0.01", "placement.reference.actors=1"), 0.6),
        (("algorithm.kl.coefficient=0.01", "model.lora.rank=8"), 0.6),
        (("algorithm.kl.coefficient=0.01", "reward_model.path=model"), 0.4),
        (("teacher.path=model",), 0.5),
        (("+teacher.paths.math=model", "+teacher.paths.code=model", "reward_model.path=model"), 0.4),
    ],
)
def test_default_share_of_a_gpu_leaves_room_for_frozen_models_that_stay(options: tuple[str, ...], share: float) -> None:
    assert on("cuda", *options).engine_limits["gpu_memory_utilization"] == share


def test_default_share_of_a_gpu_leaves_room_for_the_references_of_prime() -> None:
    for options, share in (
        ((), 0.5),
        (("model.lora.rank=8",), 0.5),
        (("algorithm.kl.coefficient=0.01",), 0.4),
        (("algorithm.kl.coefficient=0.01", "placement.reference.actors=1"), 0.5),
    ):
        config = configured("prime", "model.path=model", "placement.device=cuda", *options)
        assert config.engine_limits["gpu_memory_utilization"] == share, options


@pytest.mark.parametrize(
    ("device", "options", "sleep"),
    [
        ("cpu", (), "kv_cache"),
        ("cuda", (), "all"),
        ("cuda", ("model.lora.rank=8",), "kv_cache"),
        ("cuda", ("model.lora.rank=8", "rollout.lora=merged"), "all"),
        ("cuda", ("rollout.sleep=kv_cache",), "kv_cache"),
        ("cuda", ("schedule.max_staleness=1",), "none"),
    ],
)
def test_rollout_sleep_frees_the_weights_on_gpus_if_all_weights_are_sent(
    device: str, options: tuple[str, ...], sleep: str
) -> None:
    assert on(device, *options).rollout_sleep == sleep


@pytest.mark.parametrize(
    ("options", "correction"),
    [
        ((), "none"),
        (("+rollout.vllm.max_num_batched_tokens=4096",), "none"),
        (("+rollout.vllm.kv_cache_dtype=auto",), "none"),
        (("+rollout.vllm.kv_cache_dtype=fp8",), "token_tis"),
        (("+rollout.vllm.quantization=fp8",), "token_tis"),
        (("rollout.dtype=float32",), "token_tis"),
        (("rollout.dtype=bfloat16",), "none"),
        (("rollout.dtype=float32", "model.precision=32-true"), "none"),
        (("+rollout.vllm.quantization=fp8", "algorithm.correction=none"), "none"),
        (("+rollout.vllm.quantization=fp8", "algorithm.correction=icepop"), "icepop"),
        (("+rollout.vllm.quantization=fp8", "schedule.max_staleness=1"), "none"),
    ],
)
def test_correction_is_truncated_importance_sampling_if_the_engine_computes_with_other_types(
    options: tuple[str, ...], correction: str
) -> None:
    assert on("cuda", *options).algorithm["correction"] == correction
