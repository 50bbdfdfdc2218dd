"""Statistics over the steps of a run: both sides of a comparison have the same."""

from __future__ import annotations

from benchmarks.runs import MeasuredRun
from benchmarks.simulator import SimulatedStep
from benchmarks.simulator_accuracy import MeasuredSteps, line
from benchmarks.step_overhead import median_overhead


def test_median_overhead_leaves_out_the_warm_up_steps() -> None:
    steps = [{"time/step": seconds, "time/rollout": 1.0, "time/update_policy": 2.0} for seconds in (9, 9, 4, 5, 6)]
    assert median_overhead(MeasuredRun(steps)) == 2.0


def test_line_of_simulator_accuracy_compares_means() -> None:
    steps = MeasuredSteps([{"time/step": seconds} for seconds in (1.0, 1.0, 2.0, 4.0)], [])
    predicted = SimulatedStep(2.0, 0.5, 0.5, 0.0, 0, 0.0, 1.0)
    assert line("name", predicted, steps).split("|")[1].split() == ["2.00", "2.00", "1.00"]
