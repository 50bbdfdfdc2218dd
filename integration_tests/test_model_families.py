"""Families of models that differ most, over Ray, DeepSpeed, FSDP2 and vLLM, as in the table of model families."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.model_families import in_a_process, runs_of
from integration_tests.command_server import run_command
from integration_tests.conftest import RUN_DEADLINE_S

pytestmark = pytest.mark.extended


# Soft-capped logits and two kinds of attention; experts with a shared expert; experts with biases, and attention sinks.
@pytest.mark.parametrize("family", ["gemma2", "qwen2_moe", "gpt_oss"])
def test_family_trains_and_engines_have_the_weights_of_the_policy(family: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.model_families", "--one", family, "--folder", str(tmp_path)]
    log = run_command(command, cwd=tmp_path, check=True, timeout_s=RUN_DEADLINE_S).stdout
    row = in_a_process(family, tmp_path)
    assert row.reasons == {}, log[-3000:]
    assert row.done == list(runs_of(family)) and row.engine == "vllm" and row.exported and row.served and row.gap < 1e-4
