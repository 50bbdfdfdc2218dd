"""The calculator: its results, refused expressions, and rows that teach its call."""

from __future__ import annotations

import json

import pytest

from rl_plugins.data.prepare.calculator import ARGUMENT, TOOL, calculator_splits
from rl_plugins.environments.calculator import calc
from rl_plugins.tests.cases import case


def test_calc_computes_whole_numbers() -> None:
    for text, value in {"17*25": 425, "2+3*4": 14, "(2+3)*4": 20, "-7//2": -4, "10%3": 1, "-(3-5)": 2}.items():
        with case(text):
            assert calc(text) == value


def test_calc_refuses_other_expressions() -> None:
    for text in ("2**8", "1.5*2", "abs(3)", "a+1", "True+1", "'a'*3", "1 if 1 else 2", "~1"):
        with case(text), pytest.raises(ValueError, match=r"only whole numbers with \+ - \* // % and parentheses"):
            calc(text)
    with pytest.raises(ValueError, match="at most 200 characters"):
        calc("1+" * 100 + "1")
    with pytest.raises(ZeroDivisionError):
        calc("1//0")


def test_call_rows_teach_the_call_and_the_answer_of_each_product() -> None:
    sizes = {"train": 6, "dev": 2, "test": 3}
    splits = calculator_splits(sizes, seed=0)
    questions = [row["prompt"][0]["content"] for rows in splits.values() for row in rows]
    assert {name: len(rows) for name, rows in splits.items()} == {**sizes, "sft": 12}
    assert len(set(questions)) == 11 and splits == calculator_splits(sizes, seed=0)
    (first, *_), (call, answer, *_) = splits["train"], splits["sft"]
    product = first["reward_model"]["ground_truth"]
    assert product == str(calc(first["prompt"][0]["content"]))
    text = call["extra_info"]["response"]
    expected = {"name": TOOL, "arguments": {ARGUMENT: first["prompt"][0]["content"]}}
    assert json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>")) == expected
    assert [message["role"] for message in answer["prompt"]] == ["user", "assistant", "tool"]
    assert answer["prompt"][2]["content"] == answer["extra_info"]["response"] == product
