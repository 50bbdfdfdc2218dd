"""Overhead of an RL step, by the number of samples of a rank and by the number of ranks.

`python -m benchmarks.step_overhead [--steps 12]` runs the GRPO recipe on the quickstart's model with 1, 2 and 4 workers
with equal numbers of samples, and two workers with twice and four times as many samples. Compute is all work of models:
sampling, log-probs and updates. Overhead is the rest: rewards, exchange between ranks, advantages, weight transfer,
memory phases and metrics. Workers on a shared core compute more slowly. So with more workers than cores, overhead
includes the wait for slower workers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.grpo_step import prepare
from benchmarks.runs import MeasuredRun, run_grpo

COMPUTE = ("rollout", "update_policy", "old_log_probs", "ref_log_probs")
# Number of workers, and prompts of each worker.
RUNS = ((1, 8), (2, 8), (4, 8), (2, 16), (2, 32))
SAMPLES = 8


def measure(folder: Path, workers: int, prompts: int, steps: int) -> None:
    """Run one setting, and print a row."""
    run = run_grpo(
        folder,
        f"run.steps={steps}",
        f"placement.num_workers={workers}",
        # Ray permits several workers on one core.
        f"placement.cpus_per_worker={1 / workers}",
        f"batch.prompts_per_step={workers * prompts}",
        f"batch.samples_per_prompt={SAMPLES}",
        "batch.updates_per_step=1",
        "sampling.max_tokens=8",
        "data.max_prompt_tokens=24",
        name=f"{workers}x{prompts}",
    )
    middle, samples = median_overhead(run), prompts * SAMPLES
    print(f"{workers:8}{samples:18}{run.median('time/step'):10.3f}{middle:12.3f}{1e3 * middle / samples:22.3f}")


def median_overhead(run: MeasuredRun) -> float:
    """Return the median seconds of a step without compute, over the steps of `MeasuredRun.median`."""
    overhead = [
        {"overhead": step["time/step"] - sum(step.get(f"time/{name}", 0.0) for name in COMPUTE)} for step in run.steps
    ]
    return MeasuredRun(overhead).median("overhead")


def main() -> None:
    """Measure all settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    print(f"{'workers':>8}{'samples of each':>18}{'s/step':>10}{'overhead s':>12}{'ms of each sample':>22}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare("quickstart", folder)
        for workers, prompts in RUNS:
            measure(folder, workers, prompts, steps)


if __name__ == "__main__":
    main()
