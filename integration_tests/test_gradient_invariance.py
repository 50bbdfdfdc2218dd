"""The same samples give the same gradient for any number of workers, ZeRO stage, and split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration_tests.conftest import Recipe
from integration_tests.in_turn import runs_in_turn
from rl_plugins.run_folder import read_metrics

pytestmark = pytest.mark.extended

# The engine samples each response with the seed of the response, independent of the asking rank.
COMMON = (
    "rollout.engine=transformers",
    "run.steps=2",
    # Long enough for some responses to end early.
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
SAME = ("train/reward", "train/loss", "train/kl", "train/entropy", "train/gradient_norm", "train/clip_fraction")


# The longest sample has 30 tokens: a micro-batch holds all samples, one, or a few of different lengths.
ON_RAY = {
    "one_zero2": ("placement.num_workers=1", "strategy.zero_stage=2", "batch.tokens_per_micro_batch=100000"),
    "two_zero1": ("placement.num_workers=2", "strategy.zero_stage=1", "batch.tokens_per_micro_batch=30"),
    "two_zero3": ("placement.num_workers=2", "strategy.zero_stage=3", "batch.tokens_per_micro_batch=100"),
}


def test_update_is_equal_for_workers_zero_stages_and_micro_batches(
    start_recipe: Callable[..., Recipe], workplace: Path, tmp_path: Path
) -> None:
    plain = start_recipe("grpo", "plain", *COMMON, "launcher=local", "batch.tokens_per_micro_batch=100000")
    given = (
        f"run.output_dir={tmp_path}", f"model.path={workplace}/tiny", "data.max_prompt_tokens=26",
        f"data.train_files=[{workplace}/data/train.parquet]", "placement.device=cpu",
    )  # fmt: skip
    recipes = [["grpo", f"run.name={name}", *given, *COMMON, *overrides] for name, overrides in ON_RAY.items()]
    with runs_in_turn(recipes, tmp_path) as wait_for:
        assert plain.wait() == 0, plain.tail()
        runs = [wait_for(name) for name in ON_RAY]
    before = vector(workplace / "tiny")
    expected, update = read_metrics(plain.run / "metrics.jsonl"), vector(plain.run / "policy") - before
    for run in runs:
        series = read_metrics(run / "metrics.jsonl")
        for name in SAME:
            assert series[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (run.name, name)
        # Adam's first steps are signs: for a gradient near 0, rounding decides.
        difference = vector(run / "policy") - before - update
        assert difference.norm() < 1e-3 * update.norm(), run.name
        assert difference.abs().median() < 1e-4 * update.abs().median(), run.name


def vector(folder: Path) -> torch.Tensor:
    weights = load_file(folder / "model.safetensors")
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])
