"""A tiny model learns a game of several turns: held-out reward, share of won games and guesses before and after GRPO.

`python -m benchmarks.game [--seeds 0] [--steps 100] [--launcher local]` makes games with a hidden number, the
quickstart's model with a vocabulary for tools, an SFT start on random guesses and a GRPO run. The best strategy halves
the range with each guess: its reward is 0.72, with 3.8 guesses. Random guesses in the range have the reward 0.25.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.agent_recipes import Setting, before_and_after, duration, read_setting, train_agent
from rl_plugins.data.prepare.game import SIZES, game_splits


def main() -> None:
    """Train, and print a line for each seed."""
    setting = read_setting(__doc__)
    lines = []
    for seed in setting.seeds:
        with tempfile.TemporaryDirectory() as name:
            lines.append(f"seed {seed}: {measure(Path(name), seed, setting)}")
    print("\n".join(lines))


def measure(folder: Path, seed: int, setting: Setting) -> str:
    """Train in a folder, and return the rewards, the won games, the guesses and the time."""
    start = time.perf_counter()
    series = train_agent("game", game_splits(SIZES, seed=seed), folder, seed, setting)
    return (
        f"held-out reward {before_and_after(series, 'reward')}, won {before_and_after(series, 'rewards/won')}, "
        f"guesses {before_and_after(series, 'rewards/guesses')} in {duration(series)}, "
        f"{time.perf_counter() - start:.0f} s in all"
    )


if __name__ == "__main__":
    main()
