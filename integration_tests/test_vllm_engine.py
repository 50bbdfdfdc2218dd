"""One live vLLM engine, in bfloat16 with tied embeddings: it sleeps, notices wrong weights, outlives what fails, and
takes batches larger than one step of its scheduler.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.weight_check import PROBE, WeightsDiffer, check_log_probs
from rl_plugins.rollout.weights import ModuleWeightSource

pytestmark = pytest.mark.integration

GIB = 2**30
PROMPTS = [[5, 6, 7], list(range(10, 50))]
SAMPLING = SamplingConfig(num_samples=2, max_tokens=12)
SEEDS = [1, 2]


class _DyingSource(ModuleWeightSource):
    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        shards = super().shards()
        yield next(shards)
        os._exit(1)


@ray.remote(num_cpus=0, max_restarts=0)
class _Worker:
    def update_and_die(self, rollout: VLLMRollout, model: str) -> None:
        policy = AutoModelForCausalLM.from_pretrained(model)
        rollout.connect(0, 1)
        rollout.update_weights(ModuleWeightSource(policy), version=1)
        rollout._send = None
        rollout.update_weights(_DyingSource(policy), version=2)


@pytest.fixture(scope="module")
def rollout(workplace: Path, running_ray: None) -> Iterator[VLLMRollout]:
    config = VLLMConfig(str(workplace / "tiny"), dtype="bfloat16", max_model_len=64, sleep="all", update_timeout_s=30)
    rollout = VLLMRollout(config)
    rollout.start()
    rollout.connect(0, 1)
    yield rollout
    rollout.stop()


@pytest.fixture(scope="module")
def source(workplace: Path) -> ModuleWeightSource:
    """The policy, in float32, other weights than those that the engine started with."""
    policy = AutoModelForCausalLM.from_pretrained(workplace / "tiny")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return ModuleWeightSource(policy)


def inside(rollout: VLLMRollout, function: Callable[[Any], Any]) -> Any:
    """Call a function with the engine's actor, in its process."""
    return ray.get(rollout._fleet.actors[0].__ray_call__.remote(function), timeout=60)


def responses(rollout: VLLMRollout) -> list[list[int]]:
    return rollout.generate(PROMPTS, SAMPLING, SEEDS).responses()


def policy_log_probs(source: ModuleWeightSource) -> list[float]:
    with torch.no_grad():
        logits: Tensor = source._module(input_ids=torch.tensor([PROBE])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(PROBE[1:])[:, None]).squeeze(-1).tolist()


def test_a_sleeping_engine_gives_its_memory_back(rollout: VLLMRollout, source: ModuleWeightSource) -> None:
    def fill_kv_cache(actor: Any) -> None:
        actor._llm.collective_rpc(lambda worker: [cache.fill_(1) for cache in worker.model_runner.kv_caches] and None)

    def bytes_of_weights(actor: Any) -> int:
        return int(actor._llm.collective_rpc(lambda worker: worker.weight_transfer_engine.receiver.held)[0])

    rollout.update_weights(source, version=1)
    before = responses(rollout)
    assert inside(rollout, bytes_of_weights) > 400_000
    inside(rollout, fill_kv_cache)
    process = psutil.Process(inside(rollout, lambda actor: os.getpid()))
    awake = process.memory_info().rss
    change = rollout.sleep()
    assert change is not None and change.expected > 0.99 * GIB
    change.check("sleep")
    assert awake - process.memory_info().rss > 0.9 * GIB
    assert inside(rollout, bytes_of_weights) == 0
    with pytest.raises(RayTaskError, match="cannot sample: its weights were given back; a weight update comes first"):
        responses(rollout)

    rollout.wake_up(["weights"])
    rollout.update_weights(source, version=2)
    rollout.wake_up(["kv_cache"])
    assert responses(rollout) == before
    check_log_probs(policy_log_probs(source), rollout.prompt_log_probs(PROBE), rollout.log_prob_tolerance)
    # The KV cache is taken page by page, as it is written.
    assert process.memory_info().rss < awake - 0.9 * GIB


@pytest.mark.parametrize(
    ("parameter", "row", "name"),
    [
        ("model.layers.1.self_attn.qkv_proj.weight", 128 + 5, "model.layers.1.self_attn.k_proj.weight"),
        ("model.layers.0.self_attn.qkv_proj.bias", 128 + 64 + 1, "model.layers.0.self_attn.v_proj.bias"),
        ("model.layers.1.mlp.gate_up_proj.weight", 384, "model.layers.1.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", 7, "model.embed_tokens.weight"),
        ("model.norm.weight", 3, "model.norm.weight"),
    ],
)
def test_one_wrong_bit_is_found_and_named(
    rollout: VLLMRollout, source: ModuleWeightSource, parameter: str, row: int, name: str
) -> None:
    def flip(actor: Any) -> None:
        def flip_bit(worker: Any) -> None:
            values = worker.model_runner.model.get_parameter(parameter).data[row].view(torch.int16).view(-1)
            values[-1] ^= 1

        actor._llm.collective_rpc(flip_bit)

    rollout.update_weights(source, version=3)
    rollout.check_weights(source)
    inside(rollout, flip)
    with pytest.raises(WeightsDiffer, match=rf"after a weight update {name} of rollout engine 0 differs"):
        rollout.check_weights(source)


def test_the_probe_sees_what_checksums_cannot(rollout: VLLMRollout, source: ModuleWeightSource) -> None:
    def scale_logits(scale: float) -> None:
        def set_scale(worker: Any) -> None:
            worker.model_runner.model.logits_processor.scale = scale

        inside(rollout, lambda actor: actor._llm.collective_rpc(set_scale))

    rollout.update_weights(source, version=4)
    expected = policy_log_probs(source)
    scale_logits(1.5)
    rollout.check_weights(source)
    with pytest.raises(WeightsDiffer, match=r"log-probs of policy and rollout engine differ by .* on the prompt"):
        check_log_probs(expected, rollout.prompt_log_probs(PROBE), 0.05)
    scale_logits(1.0)
    check_log_probs(expected, rollout.prompt_log_probs(PROBE), 0.05)


def test_samples_after_a_failure_are_those_of_before(rollout: VLLMRollout, source: ModuleWeightSource) -> None:
    def fail_in_the_third_step(actor: Any) -> None:
        engine, step, steps = actor._llm.llm_engine, actor._llm.llm_engine.step, iter(range(3))

        def failing() -> Any:
            if next(steps) == 2:
                del engine.step
                raise OSError("out of luck")
            return step()

        engine.step = failing

    rollout.update_weights(source, version=5)
    before = responses(rollout)
    inside(rollout, fail_in_the_third_step)
    with pytest.raises(OSError, match="out of luck"):
        responses(rollout)
    assert responses(rollout) == before
    with pytest.raises(RayTaskError, match=r"max_model_len|maximum"):
        rollout.generate([[5, 6], [1] * 90], SAMPLING, None)
    assert responses(rollout) == before


def test_engine_outlives_a_worker_that_dies_in_an_update(
    rollout: VLLMRollout, source: ModuleWeightSource, workplace: Path
) -> None:
    with pytest.raises(RayActorError):
        worker: Any = _Worker.remote()  # type: ignore[attr-defined]
        ray.get(worker.update_and_die.remote(rollout, str(workplace / "tiny")), timeout=300)

    rollout._send = None
    rollout.connect(0, 1)
    with pytest.raises(RayTaskError, match="cannot sample: its last weight update did not end"):
        responses(rollout)
    rollout.update_weights(source, version=6)
    rollout.check_weights(source)
    assert set(rollout.generate(PROMPTS, SAMPLING, SEEDS).policy_versions.tolist()) == {6}
    check_log_probs(policy_log_probs(source), rollout.prompt_log_probs(PROBE), rollout.log_prob_tolerance)


def test_seeded_prompts_of_more_tokens_than_one_step_takes(rollout: VLLMRollout) -> None:
    generator = random.Random(0)
    prompts = [[generator.randrange(5, 60) for _ in range(45)] for _ in range(230)]
    sampling = SamplingConfig(num_samples=2, max_tokens=3)
    once, again = (rollout.generate(prompts, sampling, seeds=list(range(230))) for _ in range(2))
    assert len(once.lengths) == 460 and once.responses() == again.responses()
