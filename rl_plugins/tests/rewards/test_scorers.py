"""The ready-made rewards: right answers, wrong answers, and no usable ground truth."""

from __future__ import annotations

import builtins
import math
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.scorers import MathVerify, exact_match, final_answer
from rl_plugins.tests.loops import for_each


def test_exact_match() -> None:
    assert exact_match(" 42\n", "42") == 1.0
    assert exact_match("42", 42) == 1.0
    assert exact_match("The answer is 42", "42") == 0.0
    assert exact_match("Yes", "yes") == 0.0
    assert exact_match("Yes", "yes", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("6 * 12 is 72\n#### 72", "72", 1.0),
        ("#### 71\n#### 72 apples, 3 left", "She has ... #### 72", 1.0),
        ("so 5 and then 72.", "72", 1.0),
        ("$1,234.50", "1234.5", 1.0),
        ("#### -3", "3", 0.0),
        ("#### -3", "-3", 1.0),
        ("18.00", 18, 1.0),
        ("#### none", "72", 0.0),
        ("no number", "72", 0.0),
        ("72 then 73", "72", 0.0),
        (".5", "0.5", 1.0),
        ("2023-2024", "2024", 1.0),
        ("#### −3", "-3", 1.0),
        ("#### −3", "3", 0.0),
        ("-3", "−3", 1.0),
        ("#### 1,00,000", "100000", 1.0),
        ("it is 1,00,000", "100000", 1.0),
        ("#### 1,23", "123", 1.0),
        ("#### +.5", "0.5", 1.0),
        ("#### -$5", "-5", 1.0),
        ("#### -$5", "5", 0.0),
        ("a loss of -\\$1,200", "-1200", 1.0),
        ("5-$3", "3", 1.0),
    ],
)
def test_final_answer(solution: str, truth: Any, expected: float) -> None:
    assert final_answer(solution, truth) == expected


def test_final_answer_with_the_marker_required() -> None:
    assert final_answer("it is 72", "72", require_marker=True) == 0.0
    assert final_answer("#### 72", "72", require_marker=True) == 1.0


def test_final_answer_refuses_a_ground_truth_without_a_number() -> None:
    with pytest.raises(ValueError, match="has no number"):
        final_answer("72", "seventy-two")


@pytest.fixture(scope="module")
def math_verify() -> MathVerify:
    return MathVerify()


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("Thus the answer is $\\frac{1}{2}$.", "0.5", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("It is $\\boxed{(x+1)^2}$", "$x^2+2x+1$", 1.0),
        ("\\boxed{3}", "\\boxed{4}", 0.0),
        ("I do not know", "4", 0.0),
        (f"It is 1{'0' * 5000}", "5", 0.0),
        ("the answer is 12", "12", 1.0),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", 1.0),
        ("it is −5", "-5", 1.0),
        ("it is −5", "5", 0.0),
        ("\\boxed{18.90}", "\\$18.90", 1.0),
        ("it costs 18.90", "\\$18.90", 1.0),
        ("\\boxed{18.90}", "It costs \\$18.90, so \\boxed{\\$18.90}", 1.0),
        ("\\boxed{18.90}", "so $x = \\$18.90$", 1.0),
        ("\\boxed{2}", "not \\boxed{1}, but \\boxed{2}", 1.0),
        ("\\boxed{1}", "not \\boxed{1}, but \\boxed{2}", 0.0),
        ("\\boxed{2}", "$\\boxed 2$", 1.0),
        ("\\boxed{2}", "$x=\\boxed 2.$", 1.0),
        ("\\boxed{7}", "It is \\boxed 7, so 7", 1.0),
        ("\\boxed{5}", "It is \\boxed{5}. I used the \\boxed command.", 1.0),
    ],
)
def test_math_verify(math_verify: MathVerify, solution: str, truth: str, expected: float) -> None:
    assert math_verify(solution, truth) == expected


def test_math_verify_refuses_an_empty_ground_truth(math_verify: MathVerify) -> None:
    with pytest.raises(ValueError, match="cannot parse the ground truth"):
        math_verify("\\boxed{4}", "")


@for_each("truth", [None, ["42"], {"answer": "42"}, ("42",), b"42", math.nan, Decimal("nan"), np.float64("nan"), 1j])
def test_ground_truth_other_than_a_text_or_a_number_is_an_error(math_verify: MathVerify, truth: Any) -> None:
    for reward in (exact_match, final_answer, math_verify):
        with pytest.raises(ValueError, match=r"the ground truth .* is neither a text nor a number"):
            reward("42", truth)


@for_each("truth", [42, 42.0, np.int64(42), np.float32(42), Decimal("42.00"), Fraction(42)])
def test_whole_number_as_a_ground_truth_has_no_decimal_point(math_verify: MathVerify, truth: Any) -> None:
    for reward in (exact_match, final_answer, math_verify):
        assert reward("42", truth) == 1.0 and reward("42.5", truth) == 0.0


@for_each(
    ("response", "truth"),
    [
        ("0.5", 0.5),
        ("0.1", np.float32(0.1)),
        # Python writes 1e-05 and 1e+16.
        ("0.00001", 1e-5),
        ("10000000000000000", 1e16),
        ("2.5", Decimal("2.50")),
        ("0", -0.0),
    ],
)
def test_float_as_a_ground_truth_is_written_in_digits(math_verify: MathVerify, response: str, truth: Any) -> None:
    for reward in (exact_match, final_answer, math_verify):
        assert reward(response, truth) == 1.0 and reward("5", truth) == 0.0


def test_exact_match_with_a_truth_value_reads_the_word() -> None:
    assert exact_match("True", True) == 1.0 and exact_match("1", True) == 0.0


def test_math_verify_raises_errors_that_the_package_hides(
    math_verify: MathVerify, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> bool:
        raise RecursionError("too deep")

    monkeypatch.setattr("math_verify.grader.sympy_expr_eq", broken)
    with pytest.raises(RecursionError):
        math_verify("\\boxed{x+1}", "x+2")


def test_math_verify_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "math_verify":
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install"):
        MathVerify()
