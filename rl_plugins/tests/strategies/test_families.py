"""Families of models train, and sample with the log-probs of training. `benchmarks/model_families.py` runs vLLM."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.tiny_families import FAMILIES, UNPACKED, save_tiny_family
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies import family_runs
from rl_plugins.tests.tiers import tiered

REPLAY = {"router_replay": "recompute", "updates_per_step": 2}
OVER_RANKS: dict[str, dict[str, Any]] = {
    "gemma2": {},  # soft-capped logits, windows, one matrix for embeddings and head
    "granite": {},  # factors of embeddings, residuals and logits
    "glm4_moe": REPLAY,  # a dense layer, then experts with a shared expert
    "deepseek_v3": REPLAY,  # latent attention
    "gpt_oss": REPLAY,  # attention sinks, experts with biases
    "qwen3_next": REPLAY,  # linear attention
}


def assert_trained(folder: Path, strategy: str, metrics: list[dict[str, float]]) -> None:
    """Compare log-probs of the engine and of training, and load the exported policy."""
    gaps = [step["train/rollout_gap_max"] for step in metrics]
    assert len(gaps) == 2 and max(gaps) < 1e-4, gaps
    before, after = (load_file(folder / name / "model.safetensors") for name in ("base", strategy))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: tensor.shape for n, tensor in after.items()}
    # Some experts get no token, and some biases of routers stay.
    assert sum(not torch.equal(before[name], after[name]) for name in before) > 0.6 * len(before)
    AutoModelForCausalLM.from_pretrained(folder / strategy, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_samples_with_the_log_probs_of_training(family: str, tmp_path: Path) -> None:
    save_tiny_family(family, tmp_path / "base")
    metrics = family_runs.train(0, "single", tmp_path, {"packing": family not in UNPACKED})
    assert_trained(tmp_path, "single", metrics)


@pytest.mark.parametrize(
    ("family", "strategy"),
    tiered(product(OVER_RANKS, ("zero", "fsdp")), core=[*zip(OVER_RANKS, cycle(("zero", "fsdp")))]),
)
def test_family_trains_over_two_ranks(family: str, strategy: str, tmp_path: Path) -> None:
    save_tiny_family(family, tmp_path / "base")
    options = {**OVER_RANKS[family], "packing": family not in UNPACKED}
    assert_trained(tmp_path, strategy, run_ranks(family_runs.train, strategy, tmp_path, options)[0][0])
