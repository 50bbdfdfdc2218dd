"""Tasks with a known layout of raw data: GSM8K and MATH, with the rows of verl; and tasks with made-up data.

A `Task` makes the rows of the splits `train` and `test` from the options of its command, `rl-plugins prepare <task>`.
"""

from __future__ import annotations

import random
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plugins.data.boxed import last_box
from rl_plugins.data.parquet import prompt_row
from rl_plugins.data.prepare.files import Record, RowList, read_split
from rl_plugins.data.prepare.splits import choose_splits
from rl_plugins.errors import ConfigError

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
_SPLITS = ("train", "test")


@dataclass(frozen=True)
class Task:
    """A task with a known layout of raw data, or with made-up data.

    Attributes:
        summary: one line for `--help`.
        add_arguments: function that adds the task's own options to its command.
        build: function that returns the rows of each split; a ConfigError names the bad raw file and line.
    """

    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    build: Callable[[Namespace], dict[str, RowList]]


# Addition ---------------------------------------------------------------------------------------------------------


def addition_rows(*, below: int, num_train: int, num_test: int, seed: int, num_dev: int = 0) -> dict[str, RowList]:
    """Return sums of two numbers: a made-up task a tiny model learns on a CPU. A prompt is `17+25=`, its answer `42`.

    Args:
        below: upper bound of the numbers, exclusive.
        num_train: number of rows of the split `train`.
        num_test: number of rows of the split `test`.
        seed: seed of the choice.
        num_dev: number of rows of the split `dev`; 0 for no such split.

    Returns:
        The rows of each split. No question comes twice.

    Raises:
        ConfigError: a number is out of range, or there are fewer different questions than rows.
    """
    if not 2 <= below <= 10**9:
        raise ConfigError(f"below={below}: choose 2 to 10^9")
    sizes = {"train": num_train, "test": num_test} | ({"dev": num_dev} if num_dev else {})
    chosen = choose_splits(range(below * below), random.Random(seed), sizes)
    return {
        split: [_addition_row(*divmod(pair, below), split, index) for index, pair in enumerate(pairs)]
        for split, pairs in chosen.items()
    }


def preference_rows(rows: RowList, *, seed: int) -> RowList:
    """Return the rows of sums as pairs: `chosen` is the sum, `rejected` a number near it, `margin` the difference."""
    rng = random.Random(seed)
    pairs = []
    for row in rows:
        total = int(row["reward_model"]["ground_truth"])
        wrong = rng.choice([number for step in (1, 2, 10) for number in (total - step, total + step) if number >= 0])
        pairs.append({**row, "chosen": str(total), "rejected": str(wrong), "margin": float(abs(wrong - total))})
    return pairs


def _addition_row(left: int, right: int, split: str, index: int) -> dict[str, Any]:
    return prompt_row(
        f"{left}+{right}=", str(left + right), data_source="addition", ability="math", split=split, index=index
    )


def _addition_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--below", type=int, default=100, help="summands are below this (default: %(default)s)")
    parser.add_argument("--num-train", type=int, default=4096, help="rows to train on (default: %(default)s)")
    parser.add_argument("--num-test", type=int, default=256, help="held-out rows (default: %(default)s)")
    parser.add_argument("--num-dev", type=int, default=0, help="further held-out rows, to choose settings by")
    parser.add_argument("--pairs", action="store_true", help="write each split as pairs of responses, too")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice (default: %(default)s)")


def _build_addition(options: Namespace) -> dict[str, RowList]:
    splits = addition_rows(
        below=options.below,
        num_train=options.num_train,
        num_test=options.num_test,
        num_dev=options.num_dev,
        seed=options.seed,
    )
    if options.pairs:
        splits |= {f"{split}_pairs": preference_rows(rows, seed=options.seed) for split, rows in splits.items()}
    return splits


# Agents -----------------------------------------------------------------------------------------------------------


MakeSplits = Callable[[Mapping[str, int], int], dict[str, RowList]]
"""Returns the rows of each split, from the numbers of rows of `train`, `dev` and `test`, and a seed."""


def agent_task(summary: str, sizes: Mapping[str, int], make_splits: MakeSplits) -> Task:
    """Return a task for an agent recipe, with the splits `train`, `dev`, `test` and `sft`.

    Args:
        summary: one line for `--help`.
        sizes: default number of rows of `train`, `dev` and `test`.
        make_splits: function that makes the rows.
    """

    def add_arguments(parser: ArgumentParser) -> None:
        for split, size in sizes.items():
            parser.add_argument(f"--num-{split}", type=int, default=size, help=f"rows of {split} (default: {size})")
        parser.add_argument("--seed", type=int, default=0, help="seed of the choice (default: %(default)s)")

    def build(options: Namespace) -> dict[str, RowList]:
        return make_splits({split: getattr(options, f"num_{split}") for split in sizes}, options.seed)

    return Task(summary, add_arguments, build)


# GSM8K ------------------------------------------------------------------------------------------------------------


def gsm8k_answer(answer: str) -> str:
    """Return the number after the last `####` in a worked answer, without thousands separators and a dollar sign.

    Raises:
        ValueError: there is no such number.
    """
    _, marker, tail = answer.rpartition("####")
    match = re.match(r"\s*(-?)\$?(-?\.?[0-9][0-9.,]*)", tail)
    if not marker or match is None:
        raise ValueError(f"the answer has no '#### number': {answer[-60:]!r}")
    return "".join(match.groups()).replace(",", "").rstrip(".")


def _build_gsm8k(options: Namespace) -> dict[str, RowList]:
    def make_row(record: Record, split: str, index: int) -> dict[str, Any]:
        question, answer = record["question"], record["answer"]
        return prompt_row(
            f"{question} {options.instruction}".strip(),
            gsm8k_answer(answer),
            data_source="openai/gsm8k",
            ability="math",
            split=split,
            index=index,
            question=question,
            answer=answer,
        )

    return {split: read_split(options.input, split, ("question", "answer"), make_row) for split in _SPLITS}


# MATH -------------------------------------------------------------------------------------------------------------


def last_boxed(solution: str) -> str:
    """Return the content of the last `\\boxed{...}`, as `last_box` reads it.

    Raises:
        ValueError: there is no box, or its braces do not match.
    """
    box = last_box(solution)
    if box is None:
        raise ValueError(f"the solution has no \\boxed{{}}: {solution[-60:]!r}")
    content, is_closed = box
    if not is_closed:
        raise ValueError(f"the braces of \\boxed do not match: {content[:60]!r}")
    return content


def _build_math(options: Namespace) -> dict[str, RowList]:
    def make_row(record: Record, split: str, index: int) -> dict[str, Any] | None:
        problem, solution = record["problem"], record["solution"]
        answer = last_boxed(solution)
        if not answer.strip():
            return None
        described = {name: str(record[name]) for name in ("level", "type") if name in record}
        return prompt_row(
            f"{problem} {options.instruction}".strip(),
            answer,
            data_source="DigitalLearningGmbH/MATH-lighteval",
            ability="math",
            split=split,
            index=index,
            problem=problem,
            answer=solution,
            **described,
        )

    return {split: read_split(options.input, split, ("problem", "solution"), make_row) for split in _SPLITS}


def _question_arguments(instruction: str) -> Callable[[ArgumentParser], None]:
    """Return a function that adds the options of a task with a folder of questions."""

    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument(
            "--input", type=Path, required=True, help="folder with train.* and test.* (jsonl or parquet)"
        )
        parser.add_argument(
            "--instruction", default=instruction, help="text appended to every question (default: %(default)r)"
        )

    return add_arguments


TASKS = {
    "addition": Task("made-up sums for a tiny model; needs no raw data", _addition_arguments, _build_addition),
    "gsm8k": Task(
        "grade-school problems: question, answer ending in '#### 42'",
        _question_arguments(GSM8K_INSTRUCTION),
        _build_gsm8k,
    ),
    "math": Task(
        "competition problems: problem, solution with \\boxed{}", _question_arguments(MATH_INSTRUCTION), _build_math
    ),
}
