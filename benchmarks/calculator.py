"""A tiny model learns to call a calculator: held-out reward before and after GRPO, with the tool and without.

`python -m benchmarks.calculator [--seeds 0] [--steps 60] [--launcher local]` makes products of numbers, the
quickstart's model with a vocabulary for tools, an SFT start and a GRPO run. Without the tool, both stages have the
answers alone.
"""

from __future__ import annotations

from benchmarks.agent_recipes import measure_agent, read_setting
from rl_plugins.data.prepare.calculator import SIZES, calculator_splits
from rl_plugins.data.prepare.files import RowList

SHOWN = {"held-out reward": "reward"}
WITHOUT_TOOL = ["environment=reply", "environment.tools=[]"]


def answer_rows(rows: RowList) -> RowList:
    """Return a row for SFT for each product: the answer without a tool."""
    return [{**row, "extra_info": {"response": row["reward_model"]["ground_truth"]}} for row in rows]


def main() -> None:
    """Train, and print a line for each seed and each kind of policy."""
    setting = read_setting(__doc__)
    lines = []
    for seed in setting.seeds:
        splits = calculator_splits(SIZES, seed)
        without_calls = {**splits, "sft": answer_rows(splits["train"])}
        for kind, rows, further in (("with the tool", splits, []), ("without the tool", without_calls, WITHOUT_TOOL)):
            measured = measure_agent("calculator", rows, seed, setting, SHOWN, further)
            lines.append(f"seed {seed}, {kind}: {measured}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
