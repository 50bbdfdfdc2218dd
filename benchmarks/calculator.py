"""A tiny model learns to call a calculator: held-out reward before and after GRPO, with the tool and without.

`python -m benchmarks.calculator [--seeds 0] [--steps 60] [--launcher local]` makes products of numbers, the
quickstart's model with a vocabulary for tools, an SFT start and a GRPO run. Without the tool, both stages have the
answers alone.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.agent_recipes import Setting, before_and_after, duration, read_setting, train_agent
from rl_plugins.data.prepare.calculator import SIZES, answer_rows, calculator_splits

WITHOUT_TOOL = ["environment=reply", "environment.tools=[]"]


def main() -> None:
    """Train, and print a line for each seed and each kind of policy."""
    setting = read_setting(__doc__)
    lines = []
    for seed in setting.seeds:
        for with_tool in (True, False):
            with tempfile.TemporaryDirectory() as name:
                lines.append(f"seed {seed}, {measure(Path(name), seed, setting, with_tool=with_tool)}")
    print("\n".join(lines))


def measure(folder: Path, seed: int, setting: Setting, *, with_tool: bool) -> str:
    """Train in a folder, and return the rewards and the time."""
    start = time.perf_counter()
    splits = calculator_splits(SIZES, seed=seed)
    if not with_tool:
        splits["sft"] = answer_rows(splits["train"])
    further = [] if with_tool else WITHOUT_TOOL
    series = train_agent("calculator", splits, folder, seed, setting, further=further)
    kind = "with the tool" if with_tool else "without the tool"
    return (
        f"{kind}: held-out reward {before_and_after(series, 'reward')} in {duration(series)}, "
        f"{time.perf_counter() - start:.0f} s in all"
    )


if __name__ == "__main__":
    main()
