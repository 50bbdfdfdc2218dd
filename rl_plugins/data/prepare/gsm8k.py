"""GSM8K: grade-school problems whose worked answer ends with `#### 42`. The row is verl's."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from typing import Any

from rl_plugins.data.prepare.layout import Layout, Rows, add_raw_arguments, build_splits

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def final_answer(answer: str) -> str:
    """Return the number after `####`, without thousands separators.

    Raises:
        ValueError: there is none.
    """
    match = re.search(r"####\s*(-?[0-9][0-9.,]*)", answer)
    if match is None:
        raise ValueError(f"the answer has no '#### number': {answer[-60:]!r}.")
    return match.group(1).replace(",", "").rstrip(".")


def _arguments(parser: ArgumentParser) -> None:
    add_raw_arguments(parser, INSTRUCTION)


def _build(options: Namespace) -> dict[str, Rows]:
    def make_row(record: dict[str, Any], split: str, index: int) -> dict[str, Any]:
        question, answer = record["question"], record["answer"]
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} {options.instruction}".strip()}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": final_answer(answer)},
            "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
        }

    return build_splits(options.input, ("question", "answer"), make_row)


LAYOUT = Layout("grade-school problems: question, answer ending in '#### 42'", _arguments, _build)
