"""Phase times of the simulator agree with a plan, and with measured times of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_plugins.planning.phase_times import corrected, planned
from rl_plugins.planning.placement import Placement
from rl_plugins.planning.simulator import Batch, Layout, Schedule, simulate
from rl_plugins.planning.step_time import step_time
from rl_plugins.tests.planning.test_step_time import DEVICE, WORK

# Processes that do not get in each other's way, and that read and multiply one after the other.
CPU = replace(DEVICE, cores=8)
PLACE = Placement(2, 2, zero_stage=2, offload="stay")
EVEN = Batch(WORK.prompts, WORK.samples, WORK.prompt_tokens, lambda rng: int(WORK.response_tokens))


def test_planned_phase_times_simulate_to_the_planned_step_time():
    plan = step_time(WORK, PLACE, CPU, 8)
    out = simulate(planned(WORK, PLACE, CPU, 8), Layout(2, 2), Schedule(), EVEN, steps=2)
    assert out.step_s == pytest.approx(plan.step)
    assert out.trainer_idle == pytest.approx(plan.rollout / plan.step)


def test_corrected_phase_times_simulate_to_the_measured_step_time():
    plan = step_time(WORK, PLACE, CPU, 8)
    rollout, update, weights, rest = 2 * plan.rollout, 3 * plan.update, 5 * plan.update_weights, 7.0
    row = {
        "time/rollout": rollout,
        "time/update_policy": update,
        "time/update_weights": weights,
        "time/step": rollout + update + weights + rest,
    }
    # The first step, which warms up, does not count.
    metrics = {name: {1: 100 * value, 2: value, 3: value} for name, value in row.items()}
    times = corrected(planned(WORK, PLACE, CPU, 8), WORK, PLACE, CPU, metrics)
    out = simulate(times, Layout(2, 2), Schedule(), EVEN, steps=2)
    assert out.step_s == pytest.approx(row["time/step"])
    assert times.train_fixed_s == pytest.approx(rest)
