"""A training worker that dies in the middle of a weight update leaves an engine that the next worker can use."""

from __future__ import annotations

import os
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


def test_engine_outlives_a_worker_that_dies_in_an_update(workplace: Path) -> None:
    model = str(workplace / "tiny")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        rollout = VLLMRollout(VLLMConfig(model=model, max_model_len=32, max_num_seqs=4, update_timeout_s=30))
        rollout.start()
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
        rollout.stop()
    finally:
        ray.shutdown()
