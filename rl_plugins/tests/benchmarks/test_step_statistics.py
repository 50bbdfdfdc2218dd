"""Statistics over the steps of a run: both sides of a comparison have the same."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.runs import MeasuredRun
from benchmarks.simulator import SimulatedStep, Workers
from benchmarks.simulator_accuracy import SAMPLES, MeasuredSteps, fit, line, predict
from benchmarks.step_overhead import median_overhead
from rl_plugins.config.sampling import Schedule


def test_median_overhead_leaves_out_the_warm_up_steps() -> None:
    steps = [{"time/step": seconds, "time/rollout": 1.0, "time/update_policy": 2.0} for seconds in (9, 9, 4, 5, 6)]
    assert median_overhead(MeasuredRun(steps)) == 2.0


def test_line_of_simulator_accuracy_compares_means() -> None:
    steps = MeasuredSteps([{"time/step": seconds} for seconds in (1.0, 1.0, 2.0, 4.0)], [])
    predicted = SimulatedStep(2.0, 0.5, 0.5, 0.0, 0, 0.0, 1.0)
    assert line("name", predicted, steps).split("|")[1].split() == ["2.00", "2.00", "1.00"]


def steps_of(prompts: int) -> MeasuredSteps:
    """Return steps with equal lengths. Every second step is three times as slow as the others."""
    samples = prompts * SAMPLES
    phases = {
        "time/rollout": 1.0 + 0.05 * samples,
        "time/update_weights": 0.1,
        "time/update_policy": 0.5 + 0.1 * samples,
    }
    seconds = {**phases, "time/step": sum(phases.values())}
    steps = [{name: factor * value for name, value in seconds.items()} for factor in (1, 3) * 3]
    return MeasuredSteps(steps, [[64] * samples] * len(steps))


def test_prediction_for_runs_with_slow_steps_equals_the_mean_step() -> None:
    runs = {prompts: steps_of(prompts) for prompts in (4, 12)}
    times = fit(list(runs.items()), trainers=2)
    for prompts, seen in runs.items():
        predicted = predict(times, prompts, Workers(2, 1), Schedule(0), [64])
        assert predicted.step_s == pytest.approx(fmean(step["time/step"] for step in seen.steps), rel=0.02)
