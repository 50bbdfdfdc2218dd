"""Learning in conversations: after a wrong answer the policy gets the hint `>` or `<`, and answers again.

`python -m benchmarks.conversations [--seeds 0 1 2] [--turns 3]` uses the data, the tiny model, the SFT start and the
settings of the quickstart. The reward is 1 divided by the number of answers. The policy has never seen a hint before.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import config_of, start
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.run_folder import read_metrics

STEPS = 75


def higher_lower(
    solution_str: str, ground_truth: str, messages: Sequence[Mapping[str, Any]], turns_left: int
) -> float | str:
    """Environment: reply with a hint to a wrong answer."""
    if solution_str == ground_truth:
        return 1 / sum(message["role"] == "assistant" for message in messages)
    if not turns_left:
        return 0.0
    if not solution_str.isdigit():
        return "?"
    return ">" if int(solution_str) < int(ground_truth) else "<"


def main() -> None:
    """Train, and print a line for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    lines = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            start(folder, seed)
            # An answer has at most three tokens. A hint has four, including the tokens of roles.
            options = [
                f"environment.max_turns={arguments.turns}", f"sampling.max_tokens={4 + 8 * (arguments.turns - 1)}",
                "reward.functions.default._target_=benchmarks.conversations.higher_lower", f"run.steps={STEPS}",
            ]  # fmt: skip
            run_recipe(config_of("grpo", folder, seed, options))
            series = read_metrics(folder / "grpo" / "metrics.jsonl")
        rewards = list(series["val/reward"].values())
        turns, gap = list(series["train/turns"].values()), max(series["train/rollout_gap_max"].values())
        seconds = sorted(series["time/step"].values())[len(turns) // 2]
        lines.append(
            f"seed {seed}: held-out reward {rewards[0]:.3f} -> {rewards[-1]:.3f}, answers per problem {turns[0]:.2f} "
            f"-> {turns[-1]:.2f}, largest gap of a log-prob {gap:.1e}, {seconds:.2f} s/step"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
