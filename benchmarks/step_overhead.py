"""What an RL step costs outside compute, by the number of samples of a rank and by the number of ranks.

`python -m benchmarks.step_overhead [--steps 12]` runs the GRPO recipe on the quickstart's model with 1, 2 and 4 workers
of equally many samples each, and with twice and four times as many samples for each of two workers. Compute is what
runs a model: sampling, log-probs, updates. All else is overhead: rewards, exchange between ranks, advantages, weights
to the engine, memory phases, metrics. Workers that have to share a core compute more slowly, so with more workers than
cores overhead contains waiting for those that do.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.grpo_step import prepare
from benchmarks.runs import run_grpo

COMPUTE = ("rollout", "update_policy", "old_log_probs", "ref_log_probs")
# Workers, prompts of each.
RUNS = ((1, 8), (2, 8), (4, 8), (2, 16), (2, 32))
SAMPLES = 8


def measure(folder: Path, workers: int, prompts: int, steps: int) -> None:
    """One run, one row."""
    run = run_grpo(
        folder,
        f"run.steps={steps}",
        f"placement.num_workers={workers}",
        # Ray does not mind that several share a core.
        f"placement.cpus_per_worker={1 / workers}",
        f"batch.prompts_per_step={workers * prompts}",
        f"batch.samples_per_prompt={SAMPLES}",
        "batch.updates_per_step=1",
        "sampling.max_tokens=8",
        "data.max_prompt_tokens=24",
        name=f"{workers}x{prompts}",
    )
    compute = [sum(step.get(f"time/{name}", 0.0) for name in COMPUTE) for step in run.steps]
    overhead = sorted(step["time/step"] - part for step, part in zip(run.steps, compute, strict=True))
    middle = overhead[len(overhead) // 2]
    samples = prompts * SAMPLES
    print(f"{workers:8}{samples:18}{run.median('time/step'):10.3f}{middle:12.3f}{1e3 * middle / samples:22.3f}")


def main() -> None:
    """Run and print."""
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
