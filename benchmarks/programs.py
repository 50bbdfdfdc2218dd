"""A tiny model learns to write programs: held-out reward, missing programs and errors, before and after GRPO.

`python -m benchmarks.programs [--seeds 0] [--steps 60] [--launcher local]` makes functions to program from two of
their values, the quickstart's model with a vocabulary for tools, an SFT start and a GRPO run. A program runs in the
sandbox, with two tests.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.agent_recipes import Setting, before_and_after, duration, read_setting, train_agent
from rl_plugins.data.prepare.programs import SIZES, program_splits


def main() -> None:
    """Train, and print a line for each seed."""
    setting = read_setting(__doc__)
    lines = []
    for seed in setting.seeds:
        with tempfile.TemporaryDirectory() as name:
            lines.append(f"seed {seed}: {measure(Path(name), seed, setting)}")
    print("\n".join(lines))


def measure(folder: Path, seed: int, setting: Setting) -> str:
    """Train in a folder, and return the rewards, the responses without a program, the errors and the time."""
    start = time.perf_counter()
    series = train_agent("programs", program_splits(SIZES, seed=seed), folder, seed, setting)
    return (
        f"held-out reward {before_and_after(series, 'reward')}, without a program "
        f"{before_and_after(series, 'rewards/no_program')}, errors {before_and_after(series, 'rewards/errors')} in "
        f"{duration(series)}, {time.perf_counter() - start:.0f} s in all"
    )


if __name__ == "__main__":
    main()
