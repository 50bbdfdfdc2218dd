"""The resident vLLM engine in bfloat16, with tied embeddings: memory, checks of weights, and recovery from failures."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor

from integration_tests.resident import (
    assert_engine_has,
    change,
    hold_after,
    inside,
    load_policy,
    log_probs_of,
    steps_taken,
)
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.rollout.engine import GroupRequest
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.weights.check import PROBE, WeightsDiffer, check_log_probs
from rl_plugins.weights.source import ModuleWeightSource

GIB = 2**30
PROMPTS = [[5, 6, 7], list(range(10, 50))]
SAMPLING = SamplingConfig(num_samples=2, max_tokens=12)
SEEDS = [1, 2]


class _DyingSource(ModuleWeightSource):
    """Weights of a sender whose process ends after the first shard of an update."""

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        shards = super().shards()
        yield next(shards)
        os._exit(1)


@ray.remote(num_cpus=0, max_restarts=0)
class _Worker:
    def update_and_die(self, rollout: VLLMRollout, workplace: Path) -> None:
        policy = load_policy(workplace)
        rollout.connect(0, 1)
        rollout.update_weights(ModuleWeightSource(policy), version=1)
        rollout._disconnect()
        rollout.update_weights(_DyingSource(policy), version=2)


@pytest.fixture(scope="module")
def policy(workplace: Path) -> Any:
    """The policy, in float32, with weights different from the engine's first weights. Tests must not change it."""
    policy = load_policy(workplace)
    change(policy, seed=0)
    return policy


@pytest.fixture
def source(policy: Any) -> ModuleWeightSource:
    return ModuleWeightSource(policy)


def responses(rollout: VLLMRollout) -> list[list[int]]:
    return rollout.generate(PROMPTS, SAMPLING, SEEDS).responses()


def test_sleep_frees_memory_that_update_weights_brings_back(
    bfloat16_engine: VLLMRollout, policy: Any, source: ModuleWeightSource
) -> None:
    def fill_kv_cache(actor: Any) -> None:
        actor._llm.collective_rpc(lambda worker: [cache.fill_(1) for cache in worker.model_runner.kv_caches] and None)

    def bytes_of_weights(actor: Any) -> int:
        return int(actor._llm.collective_rpc(lambda worker: worker.weight_transfer_engine.receiver.resident_bytes)[0])

    bfloat16_engine.update_weights(source, version=1)
    before = responses(bfloat16_engine)
    assert inside(bfloat16_engine, bytes_of_weights) > 400_000
    inside(bfloat16_engine, fill_kv_cache)
    process = psutil.Process(inside(bfloat16_engine, lambda actor: os.getpid()))
    awake = process.memory_info().rss
    freed = bfloat16_engine.sleep()
    assert freed is not None and freed.expected > 0.99 * GIB
    freed.check("sleep")
    assert awake - process.memory_info().rss > 0.9 * GIB
    assert inside(bfloat16_engine, bytes_of_weights) == 0
    with pytest.raises(RayTaskError, match="cannot sample: its weights were given back; a weight update comes first"):
        responses(bfloat16_engine)

    bfloat16_engine.wake_up(["weights"])
    bfloat16_engine.update_weights(source, version=2)
    bfloat16_engine.wake_up(["kv_cache"])
    assert responses(bfloat16_engine) == before
    assert_engine_has(bfloat16_engine, policy)
    # The KV cache gets its pages one by one, with the writes.
    assert process.memory_info().rss < awake - 0.9 * GIB


@for_each(
    ("parameter", "row", "name"),
    [
        ("model.layers.1.self_attn.qkv_proj.weight", 128 + 5, "model.layers.1.self_attn.k_proj.weight"),
        ("model.layers.0.self_attn.qkv_proj.bias", 128 + 64 + 1, "model.layers.0.self_attn.v_proj.bias"),
        ("model.layers.1.mlp.gate_up_proj.weight", 384, "model.layers.1.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", 7, "model.embed_tokens.weight"),
        ("model.norm.weight", 3, "model.norm.weight"),
    ],
)
def test_check_weights_names_the_parameter_with_one_wrong_bit(
    bfloat16_engine: VLLMRollout, source: ModuleWeightSource, parameter: str, row: int, name: str
) -> None:
    def flip(actor: Any) -> None:
        def flip_bit(worker: Any) -> None:
            values = worker.model_runner.model.get_parameter(parameter).data[row].view(torch.int16).view(-1)
            values[-1] ^= 1

        actor._llm.collective_rpc(flip_bit)

    bfloat16_engine.update_weights(source, version=3)
    bfloat16_engine.check_weights(source)
    inside(bfloat16_engine, flip)
    with pytest.raises(WeightsDiffer, match=rf"after a weight update {name} of rollout engine 0 differs"):
        bfloat16_engine.check_weights(source)


@contextmanager
def scaled_logits(rollout: VLLMRollout, scale: float) -> Iterator[None]:
    def set_scale(scale: float) -> None:
        def set_in_worker(worker: Any) -> None:
            worker.model_runner.model.logits_processor.scale = scale

        inside(rollout, lambda actor: actor._llm.collective_rpc(set_in_worker))

    set_scale(scale)
    yield
    set_scale(1.0)


def test_check_log_probs_finds_wrong_logits_that_check_weights_does_not_find(
    bfloat16_engine: VLLMRollout, policy: Any, source: ModuleWeightSource
) -> None:
    bfloat16_engine.update_weights(source, version=4)
    expected = log_probs_of(policy, PROBE)
    with scaled_logits(bfloat16_engine, 1.5):
        bfloat16_engine.check_weights(source)
        scaled = bfloat16_engine.prompt_log_probs(PROBE)
    with pytest.raises(WeightsDiffer, match=r"log-probs of policy and rollout engine differ by .* on the prompt"):
        check_log_probs(expected, scaled, 0.05)
    check_log_probs(expected, bfloat16_engine.prompt_log_probs(PROBE), 0.05)


def test_generate_after_a_failure_returns_the_samples_of_before(
    bfloat16_engine: VLLMRollout, source: ModuleWeightSource
) -> None:
    def fail_in_the_third_step(actor: Any) -> None:
        engine, step, steps = actor._llm.llm_engine, actor._llm.llm_engine.step, iter(range(3))

        def failing() -> Any:
            if next(steps) == 2:
                del engine.step
                raise OSError("out of luck")
            return step()

        engine.step = failing

    bfloat16_engine.update_weights(source, version=5)
    before = responses(bfloat16_engine)
    inside(bfloat16_engine, fail_in_the_third_step)
    with pytest.raises(OSError, match="out of luck"):
        responses(bfloat16_engine)
    assert responses(bfloat16_engine) == before
    with pytest.raises(RayTaskError, match=r"max_model_len|maximum"):
        bfloat16_engine.generate([[5, 6], [1] * 300], SAMPLING, None)
    assert responses(bfloat16_engine) == before


def test_update_weights_works_after_a_worker_died_in_a_weight_update(
    bfloat16_engine: VLLMRollout, policy: Any, source: ModuleWeightSource, workplace: Path
) -> None:
    with pytest.raises(RayActorError):
        worker: Any = _Worker.remote()  # type: ignore[attr-defined]
        ray.get(worker.update_and_die.remote(bfloat16_engine, workplace), timeout=patient(120))

    bfloat16_engine._disconnect()
    bfloat16_engine.connect(0, 1)
    with pytest.raises(RayTaskError, match="cannot sample: its last weight update did not end"):
        responses(bfloat16_engine)
    bfloat16_engine.update_weights(source, version=6)
    bfloat16_engine.check_weights(source)
    samples = bfloat16_engine.generate(PROMPTS, SAMPLING, SEEDS)
    assert set(samples.policy_versions.tolist()) == {6}
    assert_engine_has(bfloat16_engine, policy)


def test_generate_with_seeds_takes_more_prompt_tokens_than_one_step(bfloat16_engine: VLLMRollout) -> None:
    generator = random.Random(0)
    prompts = [[generator.randrange(5, 60) for _ in range(45)] for _ in range(230)]
    limit = inside(bfloat16_engine, lambda actor: actor._llm.llm_engine.vllm_config.scheduler_config)
    assert sum(map(len, prompts)) > limit.max_num_batched_tokens
    sampling = SamplingConfig(num_samples=2, max_tokens=3)
    once, again = (bfloat16_engine.generate(prompts, sampling, seeds=list(range(230))) for _ in range(2))
    assert len(once.lengths) == 460 and once.responses() == again.responses()


def test_update_weights_through_shared_memory_changes_groups_in_flight(
    bfloat16_engine: VLLMRollout, workplace: Path
) -> None:
    policy, prompt = load_policy(workplace), [5, 6, 7]
    source, before = ModuleWeightSource(policy), deepcopy(policy)
    bfloat16_engine.update_weights(source, version=3)
    last = hold_after(bfloat16_engine, 20)
    # A response may otherwise end earlier, because samples in bfloat16 differ between processors.
    sampling = SamplingConfig(num_samples=4, max_tokens=100, vllm={"min_tokens": 100})
    bfloat16_engine.submit([GroupRequest(0, prompt, seed=0)], sampling)
    wait_until(lambda: steps_taken(bfloat16_engine) == last, "20 steps of the engine")
    change(policy, seed=4)
    bfloat16_engine.update_weights(source, version=4)
    (group,) = bfloat16_engine.fetch(list(bfloat16_engine.collect([0], 1).values()))
    assert group is not None
    for response, log_probs, versions in zip(
        group.responses(), group.response_log_probs(), group.response_versions(), strict=True
    ):
        assert versions == [3] * 20 + [4] * 80
        with_old, with_new = (
            np.abs(np.array(log_probs) - log_probs_of(one, prompt + response)[len(prompt) - 1 :])
            for one in (before, policy)
        )
        # Means, because a single log-prob is too inexact in bfloat16.
        assert max(with_old[:20].mean(), with_new[20:].mean()) < 0.1
        assert min(with_old[20:].mean(), with_new[:20].mean()) > 0.5, "the weights hardly differ"
