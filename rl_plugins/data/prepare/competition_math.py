"""MATH: competition problems whose solution ends with the answer in `\\boxed{}`. The row is verl's."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from rl_plugins.data.prepare.layout import Layout, Rows, add_raw_arguments, build_splits

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def last_boxed(solution: str) -> str:
    """Return the content of the last `\\boxed{...}`, nested braces included.

    Raises:
        ValueError: there is none, or its braces do not match.
    """
    marker = "\\boxed{"
    start = solution.rfind(marker)
    if start < 0:
        raise ValueError(f"the solution has no \\boxed{{}}: {solution[-60:]!r}.")
    depth = 1
    for position in range(start + len(marker), len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[position], 0)
        if depth == 0:
            return solution[start + len(marker) : position]
    raise ValueError(f"the braces of \\boxed do not match: {solution[start : start + 60]!r}.")


def _arguments(parser: ArgumentParser) -> None:
    add_raw_arguments(parser, INSTRUCTION)


def _build(options: Namespace) -> dict[str, Rows]:
    def make_row(record: dict[str, Any], split: str, index: int) -> dict[str, Any]:
        problem, solution = record["problem"], record["solution"]
        described = {name: str(record[name]) for name in ("level", "type") if name in record}
        return {
            "data_source": "DigitalLearningGmbH/MATH-lighteval",
            "prompt": [{"role": "user", "content": f"{problem} {options.instruction}".strip()}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": last_boxed(solution)},
            "extra_info": {
                "split": split,
                "index": index,
                "problem": problem,
                "answer": solution,
                **described,
            },
        }

    return build_splits(options.input, ("problem", "solution"), make_row)


LAYOUT = Layout("competition problems: problem, solution with \\boxed{}", _arguments, _build)
