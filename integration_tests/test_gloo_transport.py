"""Weights over gloo into live vLLM engines, as if they were on other machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from rl_plugins.rollout.gloo_transport import GlooSender
from rl_plugins.rollout.vllm.actor import VLLMActor
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.weight_check import PROBE
from rl_plugins.rollout.weights import ModuleWeightSource

DEADLINE_S = 120.0


class Engine:
    """What rank 0 asks of an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def init(self, init_info: dict[str, Any]) -> None:
        ray.get(self.actor.init_weight_transfer_engine.remote({"expect": init_info}), timeout=DEADLINE_S)

    def load(self, version: int) -> Callable[[], None]:
        reference = self.actor.load_weights.remote(version)
        return lambda: ray.get(reference, timeout=DEADLINE_S)

    def log_probs(self) -> list[float]:
        return list(ray.get(self.actor.prompt_log_probs.remote(PROBE), timeout=DEADLINE_S))


@pytest.fixture(scope="module")
def engines(workplace: Path, running_ray: None) -> list[Engine]:
    config = VLLMConfig(str(workplace / "tiny"), max_model_len=64, transport="gloo", update_timeout_s=30)
    options = {"num_cpus": 0, "max_concurrency": 10, "runtime_env": {"env_vars": config.environment}}
    return [Engine(ray.remote(VLLMActor).options(**options).remote(config)) for _ in range(2)]


def policy_log_probs(policy: Any) -> list[float]:
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([PROBE])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(PROBE[1:])[:, None]).squeeze(-1).tolist()


def test_every_engine_samples_from_what_was_sent(engines: list[Engine], workplace: Path) -> None:
    policy: Any = AutoModelForCausalLM.from_pretrained(workplace / "tiny")
    sender = GlooSender(
        ModuleWeightSource(policy), rank=0, share=lambda value: value, engines=engines, bucket_bytes=100_000,
        timeout_s=DEADLINE_S,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for version in (1, 2):
        before = policy_log_probs(policy)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        expected = policy_log_probs(policy)
        assert max(abs(one - other) for one, other in zip(before, expected, strict=True)) > 0.1
        sender.send(version)
        for engine in engines:
            assert engine.log_probs() == pytest.approx(expected, abs=1e-4)
