"""The vLLM engine by itself: what a lost worker leaves behind, and batches larger than one step of its scheduler."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.weights import ModuleWeightSource

pytestmark = pytest.mark.integration

GREEDY = SamplingConfig(num_samples=1, max_tokens=6, temperature=0.0)


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
def model(workplace: Path) -> str:
    return str(workplace / "tiny")


@pytest.fixture(scope="module")
def rollout(model: str) -> Iterator[VLLMRollout]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    rollout = VLLMRollout(VLLMConfig(model=model, max_model_len=64, update_timeout_s=30))
    rollout.start()
    yield rollout
    rollout.stop()
    ray.shutdown()


def test_it_outlives_a_worker_that_dies_in_an_update(rollout: VLLMRollout, model: str) -> None:
    with pytest.raises(RayActorError):
        ray.get(_Worker.remote().update_and_die.remote(rollout, model), timeout=300)  # type: ignore[attr-defined]

    policy: Any = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        policy.get_output_embeddings().weight.neg_()
    rollout.connect(0, 1)
    rollout.update_weights(ModuleWeightSource(policy), version=3)
    prompt = [5, 6, 7]
    sampled = rollout.generate([prompt], GREEDY, seeds=None)
    expected = policy.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, 3:]
    assert sampled.policy_version == 3
    assert sampled.responses()[0] == expected.tolist()


def test_seeded_prompts_of_more_tokens_than_one_step_takes(rollout: VLLMRollout) -> None:
    generator = random.Random(0)
    prompts = [[generator.randrange(5, 60) for _ in range(45)] for _ in range(230)]
    sampling = SamplingConfig(num_samples=2, max_tokens=3)
    rollout.connect(0, 1)
    once, again = (rollout.generate(prompts, sampling, seeds=list(range(230))) for _ in range(2))
    assert len(once.lengths) == 460 and once.responses() == again.responses()
