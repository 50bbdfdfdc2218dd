"""Phase times of the simulator agree with a plan, and with measured times of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scaling import corrected_phase_times, planned_phase_times
from benchmarks.simulator import SamplingSchedule, StepSamples, Workers, simulate
from rl_plugins.planning.step_time import step_time
from rl_plugins.planning.workload import Plan
from rl_plugins.tests.planning.test_step_time import DEVICE, WORK

# Independent processes, which read and multiply one after the other.
CPU = replace(DEVICE, cores=8)
PLAN = Plan(2, 2, zero_stage=2, offload="stay")
EVEN = StepSamples(WORK.prompts, WORK.samples, WORK.prompt_tokens, lambda rng: int(WORK.response_tokens))


def test_planned_phase_times_simulate_to_the_planned_step_time():
    plan = step_time(WORK, PLAN, CPU, 8)
    out = simulate(planned_phase_times(WORK, PLAN, CPU, 8), Workers(2, 2), SamplingSchedule(), EVEN, steps=2)
    assert out.step_s == pytest.approx(plan.step)
    assert out.trainer_idle == pytest.approx(plan.rollout / plan.step)


def test_corrected_phase_times_simulate_to_the_measured_step_time():
    plan = step_time(WORK, PLAN, CPU, 8)
    rollout, update, weights, rest = 2 * plan.rollout, 3 * plan.update, 5 * plan.update_weights, 7.0
    row = {
        "time/rollout": rollout,
        "time/update_policy": update,
        "time/update_weights": weights,
        "time/step": rollout + update + weights + rest,
    }
    # The first step is a warm-up and does not count.
    metrics = {name: {1: 100 * value, 2: value, 3: value} for name, value in row.items()}
    times = corrected_phase_times(planned_phase_times(WORK, PLAN, CPU, 8), WORK, PLAN, CPU, metrics)
    out = simulate(times, Workers(2, 2), SamplingSchedule(), EVEN, steps=2)
    assert out.step_s == pytest.approx(row["time/step"])
    assert times.train_fixed_s == pytest.approx(rest)
