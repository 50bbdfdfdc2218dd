"""Memory in the plan of `rl-plugins plan`, compared with the memory of a run's processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_work import work_of
from benchmarks.policies import save_policy, save_prompts
from benchmarks.runs import run_grpo
from integration_tests.worker_start.sitecustomize import VARIABLE
from rl_plugins.cpu_instructions import multiplies_bfloat16
from rl_plugins.planning.devices import device_named
from rl_plugins.planning.memory import engine_memory, total, trainer_memory
from rl_plugins.planning.workload import Plan

pytestmark = pytest.mark.extended

WITHIN = 0.15
OPTIONS = [
    "run.steps=2", "batch.prompts_per_step=4", "batch.samples_per_prompt=4", "sampling.max_tokens=64",
    "data.max_prompt_tokens=64", "batch.tokens_per_micro_batch=1024", "strategy.zero_stage=2",
    "placement.num_workers=2",
    # A processor without instructions for bfloat16 would take minutes.
    f"model.precision={'bf16-true' if multiplies_bfloat16() else '32-true'}",
]  # fmt: skip


def test_planned_memory_of_trainer_and_engine_equals_measured_memory(tmp_path, monkeypatch):
    # Forks share memory with their server.
    monkeypatch.setenv(VARIABLE, "")
    save_policy(tmp_path / "policy", hidden_size=512, num_layers=12, intermediate_size=1408, vocab_size=8192)
    save_prompts(tmp_path / "data")
    run = run_grpo(tmp_path, *OPTIONS, closely=True)
    assert run.resident is not None
    start, end = run.steps[0]["time"], run.steps[-1]["time"]
    device, plan = device_named("cpu"), Plan(2, 1, zero_stage=2, offload="stay")
    lengths = run.quiet("train/response_length")
    work = replace(work_of(tmp_path / "policy", OPTIONS), response_tokens=lengths)
    trainer = device.trainer_base + total(trainer_memory(work, plan, device)["update"])
    engine = device.engine_base + total(engine_memory(work, plan, device)["sampling"])
    measured = {
        "trainer": run.resident.peak("RayTrainWorker", start, end),
        "engine": run.resident.peak("VLLMActor", start, end, shared=True),
    }
    ratios = {"trainer": trainer / measured["trainer"], "engine": engine / measured["engine"]}
    assert all(abs(ratio - 1) < WITHIN for ratio in ratios.values()), ratios
