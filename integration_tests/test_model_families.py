"""Families of models that differ most, over Ray, DeepSpeed, FSDP2 and vLLM, as in the table of model families."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.model_families import in_a_process, runs_of

pytestmark = pytest.mark.extended


# Soft-capped logits and two kinds of attention; experts with a shared expert; experts with biases, and attention sinks.
@pytest.mark.parametrize("family", ["gemma2", "qwen2_moe", "gpt_oss"])
def test_family_trains_and_engines_have_the_weights_of_the_policy(family: str, tmp_path: Path) -> None:
    row = in_a_process(family, tmp_path)
    log = (tmp_path / f"{family}.log").read_text(encoding="utf-8")
    assert row.reasons == {}, log[-3000:]
    assert row.done == list(runs_of(family)) and row.engine == "vllm" and row.exported and row.served and row.gap < 1e-4
