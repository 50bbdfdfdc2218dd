"""The ready-made rewards: right answers, wrong answers, and no usable ground truth."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.scorers import MathVerify, exact_match, final_answer


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
