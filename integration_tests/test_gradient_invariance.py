"""The same samples give the same gradient for any number of workers, ZeRO stage, and split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration_tests.conftest import Recipe
from rl_plugins.run_folder import read_metrics

# The engine samples each response with a seed of its own, which does not depend on the rank that asks.
COMMON = (
    "rollout.engine=transformers",
    "run.steps=2",
    # Long enough for some to end early.
    "sampling.max_tokens=20",
    "run.eval_every=0",
    "run.eval_before=false",
    "batch.prompts_per_step=8",
    "batch.samples_per_prompt=4",
    "batch.updates_per_step=2",
    "optimizer.lr=1e-3",
    "algorithm.kl.coefficient=0.05",
    "algorithm.aggregation=seq-mean-token-mean",
    "tracking.enabled=false",
    "reward.functions.default={_target_: integration_tests.rewards.shortness}",
)
RUN_TIMEOUT_S = 400
SAME = ("train/reward", "train/loss", "train/kl", "train/entropy", "train/gradient_norm", "train/clip_fraction")


@pytest.mark.timeout(4 * RUN_TIMEOUT_S)
def test_workers_stages_and_micro_batches_change_nothing(start_recipe: Callable[..., Recipe], workplace: Path) -> None:
    runs = []
    for name, *overrides in (
        # The longest sample has 30 tokens: a micro-batch holds all samples, one, or a few of different lengths.
        ("plain", "launcher=local", "batch.tokens_per_micro_batch=100000"),
        ("one_zero2", "placement.num_workers=1", "strategy.zero_stage=2", "batch.tokens_per_micro_batch=100000"),
        ("two_zero1", "placement.num_workers=2", "strategy.zero_stage=1", "batch.tokens_per_micro_batch=30"),
        ("two_zero3", "placement.num_workers=2", "strategy.zero_stage=3", "batch.tokens_per_micro_batch=100"),
    ):
        runs.append(start_recipe("grpo", name, *COMMON, *overrides))
        assert runs[-1].wait(RUN_TIMEOUT_S) == 0, runs[-1].tail()
    before = vector(workplace / "tiny")
    expected, update = read_metrics(runs[0].run / "metrics.jsonl"), vector(runs[0].run / "policy") - before
    for run in runs[1:]:
        series = read_metrics(run.run / "metrics.jsonl")
        for name in SAME:
            assert series[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (run.name, name)
        # Adam's first steps are signs: where a gradient is next to nothing, rounding decides.
        difference = vector(run.run / "policy") - before - update
        assert difference.norm() < 1e-3 * update.norm(), run.name
        assert difference.abs().median() < 1e-4 * update.abs().median(), run.name


def vector(folder: Path) -> torch.Tensor:
    weights = load_file(folder / "model.safetensors")
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])
