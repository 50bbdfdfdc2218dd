"""Weight updates from two ZeRO-3 workers to a running vLLM engine, compared with the limit of two memory copies.

`python -m benchmarks.weight_update [--sizes 200mb 1gb] [--updates 8]` prints the time and rate of an update (the whole
phase, as a training step sees it) and the limit measured in the same run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.policies import save_50m, save_250m, save_prompts
from benchmarks.runs import run_grpo


def copy_rate(nbytes: int) -> float:
    """Return the bytes per second of a copy of `nbytes` by one thread: median of 7, with pages in memory."""
    import torch

    torch.set_num_threads(1)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    target.copy_(source)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return nbytes / median(seconds)


SIZES = {"200mb": save_50m, "1gb": save_250m}


def measure(size: str, updates: int) -> None:
    """Measure and print one size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nbytes = 4 * SIZES[size](folder / "policy")
        save_prompts(folder / "data")
        run = run_grpo(
            folder,
            f"run.steps={updates + 2}",
            "batch.prompts_per_step=2",
            "batch.samples_per_prompt=2",
            "sampling.max_tokens=2",
        )
    # The first update is slower, because the ranks map the memory.
    seconds = run.values("time/update_weights")[1:]
    rate, limit = nbytes / median(seconds), copy_rate(nbytes) / 2
    print(f"model                  {nbytes / 1e6:.0f} MB")
    spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
    print(f"update                 {median(seconds):.3f} s (median of {len(seconds)}; {spread})")
    print(f"rate                   {rate / 1e9:.2f} GB/s")
    print(f"two copies, one thread {limit / 1e9:.2f} GB/s")
    print(f"ratio                  {rate / limit:.2f} (target: at least 0.80)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--updates", type=int, default=8)
    arguments = parser.parse_args()
    for size in arguments.sizes:
        measure(size, arguments.updates)


if __name__ == "__main__":
    main()
