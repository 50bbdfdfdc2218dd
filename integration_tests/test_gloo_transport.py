"""Weights over gloo into the resident vLLM engine in float32, as to an engine on another machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.resident import change, load_policy, log_probs_of
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.weights.check import PROBE
from rl_plugins.weights.source import ModuleWeightSource


def test_update_weights_over_gloo_gives_the_engine_the_weights(float32_engine: VLLMRollout, workplace: Path) -> None:
    policy = load_policy(workplace)
    source = ModuleWeightSource(policy)
    for version in (1, 2):
        change(policy, seed=version)
        float32_engine.update_weights(source, version)
        assert float32_engine.prompt_log_probs(PROBE) == pytest.approx(log_probs_of(policy, PROBE), abs=1e-4)
