"""Stages with replayed routes: the updates send the tokens to the experts of the pass before the updates."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import EnvironmentConfig, SamplingConfig, Schedule
from rl_plugins.data.experience import ROUTED_EXPERTS, Experience
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rollout.engine import RolloutEngine
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.rewards import sample_rewards
from rl_plugins.tests.stages import canned

Updated = tuple[list[list[Tensor]], dict[str, float], Experience]
"""Gradients of two updates, metrics and samples of a step."""


@cache
def updated(folder: Path, **options: Any) -> Updated:
    """Return the result of a step with the samples of `canned`."""
    return step(folder, canned.CannedRollout(), scorer=canned.CannedScorer(), **options)


def step(folder: Path, engine: RolloutEngine, **options: Any) -> Updated:
    """Return the result of a step."""
    # The routers change in one step.
    own = canned.mixture_policy(folder, lr=3.0)
    stage = canned.Keeping(
        own,
        tokenizer=canned.tokenizer,
        # An untrained policy ends few responses.
        sampling=SamplingConfig(max_tokens=20, num_samples=3, stop_token_ids=tuple(range(60, 200))),
        updates_per_step=2,
        max_steps=1,
        **options,
    )
    metrics = canned.metrics_of(stage)
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=engine))
    trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)]))
    return own.recorder.gradients, metrics, stage.trained_on[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_tiny_family("qwen3_moe", folder)
    return folder


def test_router_replay_repeats_the_routes_of_the_old_log_probs_in_every_update(folder: Path) -> None:
    gradients, metrics, samples = updated(folder, router_replay="recompute")
    assert [len(experts) for experts in samples.columns[ROUTED_EXPERTS]] == samples.sequence_lengths.tolist()
    assert metrics["train/router_differing"] > 0
    free_gradients, free_metrics, _ = updated(folder)
    assert "train/router_differing" not in free_metrics
    for one, other in zip(gradients[0], free_gradients[0], strict=True):
        torch.testing.assert_close(one, other)
    assert any(not torch.allclose(one, other) for one, other in zip(gradients[1], free_gradients[1], strict=True))


@pytest.mark.parametrize("options", [{"tokens_per_micro_batch": 40}, {"packing": False}], ids=str)
def test_router_replay_does_not_depend_on_micro_batches_and_packing(folder: Path, options: dict[str, Any]) -> None:
    expected, _, _ = updated(folder, router_replay="recompute")
    gradients, _, _ = updated(folder, router_replay="recompute", **options)
    for update, (gradient, wanted) in enumerate(zip(gradients, expected, strict=True)):
        for one, other in zip(gradient, wanted, strict=True):
            tolerance = (1e-5, 1e-3)[update] * float(other.abs().max()) + 1e-8
            assert float((one - other).abs().max()) <= tolerance


@pytest.mark.parametrize("max_turns", [1, 3], ids=["one_turn", "conversation"])
def test_router_replay_takes_the_experts_of_the_rollout_engine(folder: Path, max_turns: int) -> None:
    def sampled(source: str) -> Updated:
        return step(
            folder,
            TransformersRollout(str(folder), return_experts=source == "rollout"),
            scorer=InlineScorer(
                {"_target_": f"{sample_rewards.__name__}.{'talkative' if max_turns > 1 else 'length'}"}
            ),
            environment=EnvironmentConfig(max_turns=max_turns),
            router_replay=source,
        )

    gradients, metrics, samples = sampled("rollout")
    free_gradients, _, free_samples = sampled("recompute")
    assert samples.responses.equal(free_samples.responses)
    assert (metrics.get("train/turns", 1.0) > 1) == (max_turns > 1)
    assert metrics["train/rollout_gap_max"] < 1e-4 and "train/router_differing" in metrics
    pairs = zip(samples.columns[ROUTED_EXPERTS], free_samples.columns[ROUTED_EXPERTS], strict=True)
    for (experts, recomputed), tokens in zip(pairs, samples.sequence_lengths.tolist(), strict=True):
        assert len(experts) == tokens and (experts[-1] == -1).all()
        # The engine computes the same in float32, and does not run the last token.
        assert experts[:-1].equal(recomputed[:-1])
    for one, other in zip(gradients[1], free_gradients[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_router_replay_of_the_rollout_needs_the_experts_of_the_engine(folder: Path) -> None:
    with pytest.raises(DataError, match="the rollout engine returns no experts: build the engine with return_exp"):
        updated(folder, router_replay="rollout")
    with pytest.raises(ConfigError, match="router_replay=sampler: use recompute or rollout"):
        updated(folder, router_replay="sampler")


def test_router_replay_of_the_rollout_takes_a_step_without_any_response(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Conversations that failed before the first response have no routes.
    monkeypatch.setattr(canned, "RESPONSES", dict.fromkeys(canned.PROMPTS, [""] * 3))
    gradients, metrics, samples = step(
        folder, canned.CannedRollout(), scorer=canned.CannedScorer(), router_replay="rollout"
    )
    assert samples.responses.shape == (12, 0) and ROUTED_EXPERTS not in samples.columns
    assert len(gradients) == 2 and "train/router_differing" not in metrics


def test_router_replay_refuses_passes_with_tokens_of_several_ranks(folder: Path) -> None:
    own = canned.mixture_policy(folder, lr=3.0)
    canned.NoTokens(own.model)
    stage = PolicyOptimization(
        own,
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        updates_per_step=2,
        router_replay="recompute",
    )
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=canned.CannedRollout()))
    with pytest.raises(ConfigError, match="router_replay has not been tried with tensor_parallel and sequence_p"):
        trainer.fit(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates_per_step": 1}, "raise updates_per_step"),
        ({"updates_per_step": 2, "schedule": Schedule(max_staleness=1)}, "use router_replay=rollout"),
    ],
    ids=["one_update", "stale"],
)
def test_router_replay_is_refused_without_old_log_probs(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyOptimization(
            canned.mixture_policy(folder, lr=3.0),
            tokenizer=canned.tokenizer,
            scorer=canned.CannedScorer(),
            sampling=SamplingConfig(max_tokens=20, num_samples=3),
            optimizer=OptimizerConfig(lr=0.01),
            algorithm=Algorithm(),
            router_replay="recompute",
            **options,
        )
