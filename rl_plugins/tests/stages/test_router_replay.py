"""Stages with replayed routes: the updates send the tokens to the experts of the pass before the updates."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig, Schedule
from rl_plugins.data.experience import ROUTED_EXPERTS, Experience
from rl_plugins.errors import ConfigError
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.stages import canned


class MixturePolicy(canned.OwnPolicy):
    """A policy with experts, which learns so fast that its routers change in a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model

    def configure_optimizers(self) -> canned.Recorder:
        self.recorder = canned.Recorder(self.model.parameters())
        self.recorder.param_groups[0]["lr"] = 3.0
        return self.recorder


@cache
def updated(folder: Path, **options: Any) -> tuple[list[list[Tensor]], dict[str, float], Experience]:
    """Return the gradients of two updates, the metrics and the samples of a step."""
    own = MixturePolicy(folder)
    stage = canned.Keeping(
        own,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        updates_per_step=2,
        max_steps=1,
        **options,
    )
    metrics = canned.metrics_of(stage)
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()))
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)]))
    return own.recorder.gradients, metrics, stage.trained_on[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_tiny_family("qwen3_moe", folder)
    return folder


def test_router_replay_repeats_the_routes_of_the_old_log_probs_in_every_update(folder: Path) -> None:
    gradients, metrics, samples = updated(folder, router_replay=True)
    assert [len(experts) for experts in samples.columns[ROUTED_EXPERTS]] == samples.sequence_lengths.tolist()
    assert metrics["train/router_differing"] > 0
    free_gradients, free_metrics, _ = updated(folder)
    assert "train/router_differing" not in free_metrics
    for one, other in zip(gradients[0], free_gradients[0], strict=True):
        torch.testing.assert_close(one, other)
    assert any(not torch.allclose(one, other) for one, other in zip(gradients[1], free_gradients[1], strict=True))


@pytest.mark.parametrize("options", [{"tokens_per_micro_batch": 40}, {"packing": False}], ids=str)
def test_router_replay_does_not_depend_on_micro_batches_and_packing(folder: Path, options: dict[str, Any]) -> None:
    expected, _, _ = updated(folder, router_replay=True)
    gradients, _, _ = updated(folder, router_replay=True, **options)
    for update, (gradient, wanted) in enumerate(zip(gradients, expected, strict=True)):
        for one, other in zip(gradient, wanted, strict=True):
            tolerance = (1e-5, 1e-3)[update] * float(other.abs().max()) + 1e-8
            assert float((one - other).abs().max()) <= tolerance


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates_per_step": 1}, "raise updates_per_step or passes_per_step"),
        ({"updates_per_step": 2, "schedule": Schedule(max_staleness=1)}, "use a decoupled rollout correction"),
    ],
    ids=["one_update", "stale"],
)
def test_router_replay_is_refused_without_old_log_probs(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyOptimization(
            MixturePolicy(folder),
            tokenizer=canned.tokenizer,
            scorer=canned.CannedScorer(),
            sampling=SamplingConfig(max_tokens=20, num_samples=3),
            optimizer=OptimizerConfig(lr=0.01),
            algorithm=Algorithm(),
            router_replay=True,
            **options,
        )
