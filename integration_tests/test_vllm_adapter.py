"""The resident vLLM engine with updates of a policy's adapter alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration_tests.resident import LORA_RANK, load_policy, log_probs_of
from rl_plugins.config.models import LoraConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import MergedWeightSource, add_adapter
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.weights.check import PROBE
from rl_plugins.weights.source import ModuleWeightSource

pytestmark = pytest.mark.extended


def adapted(workplace: Path, seed: int) -> Any:
    """A policy with an effective adapter."""
    model = add_adapter(load_policy(workplace), LoraConfig(rank=LORA_RANK, alpha=20))
    return with_random_adapter(model, std=0.3, seed=seed)


def test_update_weights_brings_another_adapter(adapter_engine: VLLMRollout, workplace: Path) -> None:
    seen = []
    for version in (1, 2):
        model = adapted(workplace, seed=version)
        source = MergedWeightSource(ModuleWeightSource(model), model)
        assert sum(map(len, source.adapter_files().values())) < 0.3 * sum(meta.nbytes for meta in source.metadata())
        adapter_engine.update_weights(source, version)
        assert adapter_engine.prompt_log_probs(PROBE) == pytest.approx(log_probs_of(model, PROBE), abs=1e-4)
        # An adapter outlives a sleep; cached prefixes of the earlier adapter do not outlive an update.
        adapter_engine.sleep()
        samples = adapter_engine.generate([PROBE], SamplingConfig(num_samples=2, max_tokens=8), [version])
        assert set(samples.policy_versions.tolist()) == {version}
        expected = log_probs_of(model, [*PROBE, *samples.responses()[0]])[len(PROBE) - 1 :]
        assert samples.response_log_probs()[0] == pytest.approx(expected, abs=1e-4)
        seen.append(log_probs_of(model, PROBE))
    assert seen[0] != pytest.approx(seen[1], abs=0.1)


def test_update_weights_refuses_a_policy_without_an_adapter(adapter_engine: VLLMRollout, workplace: Path) -> None:
    source = ModuleWeightSource(load_policy(workplace))
    with pytest.raises(ConfigError, match="the policy has no adapter: set lora_rank=0"):
        adapter_engine.update_weights(source, version=3)
