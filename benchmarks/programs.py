"""A tiny model learns to write programs: held-out reward, missing programs and errors, before and after GRPO.

`python -m benchmarks.programs [--seeds 0] [--steps 60] [--launcher local]` makes functions to program from two of
their values, the quickstart's model with a vocabulary for tools, an SFT start and a GRPO run. A program runs in the
sandbox, with two tests.
"""

from __future__ import annotations

from benchmarks.agent_recipes import measure_agent, read_setting
from rl_plugins.data.prepare.programs import SIZES, program_splits

SHOWN = {"held-out reward": "reward", "without a program": "rewards/no_program", "errors": "rewards/errors"}


def main() -> None:
    """Train, and print a line for each seed."""
    setting = read_setting(__doc__)
    lines = [
        f"seed {seed}: {measure_agent('programs', program_splits(SIZES, seed), seed, setting, SHOWN)}"
        for seed in setting.seeds
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
