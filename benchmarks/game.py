"""A tiny model learns a game of several turns: held-out reward, share of won games and guesses before and after GRPO.

`python -m benchmarks.game [--seeds 0] [--steps 100] [--launcher local]` makes games with a hidden number, the
quickstart's model with a vocabulary for tools, an SFT start on random guesses and a GRPO run. The best strategy halves
the range with each guess: its reward is 0.72, with 3.8 guesses. Random guesses in the range have the reward 0.25.
"""

from __future__ import annotations

from benchmarks.agent_recipes import measure_agent, read_setting
from rl_plugins.data.prepare.game import SIZES, game_splits

SHOWN = {"held-out reward": "reward", "won": "rewards/won", "guesses": "rewards/guesses"}


def main() -> None:
    """Train, and print a line for each seed."""
    setting = read_setting(__doc__)
    lines = [
        f"seed {seed}: {measure_agent('game', game_splits(SIZES, seed), seed, setting, SHOWN)}"
        for seed in setting.seeds
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
