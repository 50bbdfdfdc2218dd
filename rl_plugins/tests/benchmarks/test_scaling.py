"""Phase times of the simulator agree with a plan, and with measured times of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks.scaling import corrected_phase_times, of_run, planned_phase_times
from benchmarks.simulator import StepSamples, Workers, simulate
from rl_plugins.config.recipe import parse_config
from rl_plugins.config.sampling import Schedule
from rl_plugins.errors import ConfigError
from rl_plugins.launch.compose import compose_config
from rl_plugins.planning.step_time import step_time
from rl_plugins.planning.workload import Plan
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.planning.test_step_time import DEVICE, WORK

# Independent processes, which read and multiply one after the other.
CPU = replace(DEVICE, cores=8)
PLAN = Plan(2, 2, zero_stage=2, offload="stay")
EVEN = StepSamples(WORK.prompts, WORK.samples, WORK.prompt_tokens, lambda rng: int(WORK.response_tokens))


def test_planned_phase_times_simulate_to_the_planned_step_time():
    plan = step_time(WORK, PLAN, CPU, 8)
    out = simulate(planned_phase_times(WORK, PLAN, CPU, 8), Workers(2, 2), Schedule(), EVEN, steps=2)
    assert out.step_s == pytest.approx(plan.step)
    assert out.trainer_idle == pytest.approx(plan.rollout / plan.step)


def test_corrected_phase_times_simulate_to_the_measured_step_time():
    # With several updates, a step computes the log-probs of the policy first.
    work = replace(WORK, updates=2)
    plan = step_time(work, PLAN, CPU, 8)
    rollout, update, weights, rest = 2 * plan.rollout, 3 * plan.update, 5 * plan.update_weights, 7.0
    log_probs, reference = 4 * plan.log_probs, 1.0
    assert log_probs
    row = {
        "time/rollout": rollout,
        "time/update_policy": update,
        "time/update_weights": weights,
        "time/old_log_probs": log_probs,
        "time/ref_log_probs": reference,
        "time/step": rollout + update + weights + log_probs + reference + rest,
    }
    # The first step is a warm-up and does not count.
    metrics = {name: {1: 100 * value, 2: value, 3: value} for name, value in row.items()}
    times = corrected_phase_times(planned_phase_times(work, PLAN, CPU, 8), work, PLAN, CPU, metrics)
    out = simulate(times, Workers(2, 2), Schedule(), EVEN, steps=2)
    assert out.step_s == pytest.approx(row["time/step"])
    assert times.train_fixed_s == pytest.approx(rest)


@for_each(
    ("overrides", "option"),
    [
        (["schedule.max_staleness=1"], "schedule.max_staleness=1"),
        (["placement.device=cuda", "placement.rollout=split"], "placement.rollout=split"),
    ],
)
def test_of_run_refuses_a_run_with_overlapping_phases(tmp_path: Path, overrides: list[str], option: str) -> None:
    folder = RunFolder(tmp_path)
    config = parse_config(compose_config("grpo", ["model.path=policy", "data.train_files=[train.parquet]", *overrides]))
    folder.config.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")
    with pytest.raises(ConfigError, match=option):
        of_run(folder, CPU)
