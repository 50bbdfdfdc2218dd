"""A live vLLM engine that is sent the adapter of a policy alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import LoraConfig, MergedWeightSource, add_adapter
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.weight_check import PROBE
from rl_plugins.rollout.weights import ModuleWeightSource

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def rollout(workplace: Path, running_ray: None) -> Iterator[VLLMRollout]:
    # A rank that vLLM has no room of its own for.
    rollout = VLLMRollout(VLLMConfig(str(workplace / "tiny"), max_model_len=64, lora_rank=5, check_updates=1))
    rollout.connect(0, 1)
    yield rollout
    rollout.stop()


def adapted(workplace: Path, seed: int) -> Any:
    """A policy whose adapter changes it."""
    model = add_adapter(AutoModelForCausalLM.from_pretrained(workplace / "tiny"), LoraConfig(rank=5, alpha=20))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def log_probs(model: Any) -> list[float]:
    ids = torch.tensor([PROBE])
    with torch.no_grad():
        log_probs_TV = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    gathered: list[float] = log_probs_TV.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return gathered


def test_every_update_brings_another_adapter(rollout: VLLMRollout, workplace: Path) -> None:
    seen = []
    for version in (1, 2):
        model = adapted(workplace, seed=version)
        source = MergedWeightSource(ModuleWeightSource(model), model)
        assert sum(map(len, source.adapter_files().values())) < 0.3 * sum(meta.nbytes for meta in source.metadata())
        rollout.update_weights(source, version)
        assert rollout.prompt_log_probs(PROBE) == pytest.approx(log_probs(model), abs=1e-4)
        # An adapter outlives a sleep; cached prefixes of the one before do not outlive an update.
        rollout.sleep()
        samples = rollout.generate([PROBE], SamplingConfig(num_samples=2, max_tokens=8), [version])
        assert set(samples.policy_versions.tolist()) == {version}
        full = torch.tensor([[*PROBE, *samples.responses()[0]]])
        with torch.no_grad():
            log_probs_TV = model(input_ids=full).logits[0, len(PROBE) - 1 : -1].log_softmax(-1)
        expected = log_probs_TV.gather(-1, full[0, len(PROBE) :, None])[:, 0].tolist()
        assert samples.response_log_probs()[0] == pytest.approx(expected, abs=1e-4)
        seen.append(log_probs(model))
    assert seen[0] != pytest.approx(seen[1], abs=0.1)


def test_a_policy_without_an_adapter_is_refused(rollout: VLLMRollout, workplace: Path) -> None:
    source = ModuleWeightSource(AutoModelForCausalLM.from_pretrained(workplace / "tiny"))
    with pytest.raises(ConfigError, match=r"the policy has no adapter: use rollout\.lora=merged"):
        rollout.update_weights(source, version=3)
