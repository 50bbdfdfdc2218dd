"""Ready-made rewards for checkable answers: 1.0 is right, 0.0 is wrong. A bad ground truth raises an error.

`RewardPool` and `InlineScorer` call these functions.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from numbers import Rational, Real
from typing import Any

from rl_plugins.data.boxed import last_box
from rl_plugins.data.final_number import MARKER, final_number, with_hyphens
from rl_plugins.errors import ConfigError

_DOLLAR = r"\$"
_FORMULA = re.compile(r"(?<!\\)\$")


def exact_match(solution_str: str, ground_truth: object, ignore_case: bool = False) -> float:
    """Return 1 if the response equals the ground truth, apart from white space at both ends.

    Args:
        solution_str: text of the response.
        ground_truth: right answer, a text or a number.
        ignore_case: ignore the difference between upper and lower case.

    Raises:
        ValueError: the ground truth is neither a text nor a number.
    """
    given, wanted = solution_str.strip(), _text_of(ground_truth).strip()
    return float(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


def _text_of(ground_truth: object) -> str:
    """Return the text of a ground truth. A number has no exponent, nor zeros after the last digit of a fraction."""
    # NumPy's numbers are Real, and decimals are not.
    if not isinstance(ground_truth, str | Real | Decimal) or ground_truth != ground_truth:
        raise ValueError(f"the ground truth {ground_truth!r} is neither a text nor a number")
    if isinstance(ground_truth, str | Rational):
        return str(ground_truth)
    text = f"{Decimal(str(ground_truth or 0)):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def correct_and_format(
    solution_str: str, ground_truth: object, pattern: str = r"\s*[-+]?\d+\s*", format_weight: float = 0.5
) -> dict[str, float]:
    """Score the answer (see `exact_match`) and the format of the response.

    Args:
        solution_str: text of the response.
        ground_truth: right answer.
        pattern: regular expression for the whole text of a well-formed response.
        format_weight: weight of the format in the score.

    Returns:
        `correct` and `format`, each 0 or 1, and `score = correct + format_weight format`.
    """
    correct, formatted = exact_match(solution_str, ground_truth), float(bool(re.fullmatch(pattern, solution_str)))
    return {"score": correct + format_weight * formatted, "correct": correct, "format": formatted}


def final_answer(solution_str: str, ground_truth: object, require_marker: bool = False) -> float:
    """Return 1 if the final number of the response equals the final number of the ground truth, as in GSM8K.

    See `final_number`. Numbers are compared by value: 18 equals 18.00.

    Args:
        solution_str: text of the response.
        ground_truth: right answer. The text may be a whole solution.
        require_marker: count a response without the marker as wrong.

    Raises:
        ValueError: the ground truth has no number.
    """
    wanted = final_number(_text_of(ground_truth))
    if wanted is None:
        raise ValueError(f"the ground truth {ground_truth!r} has no number")
    given = None if require_marker and MARKER not in solution_str else final_number(solution_str)
    return float(given is not None and Decimal(given) == Decimal(wanted))


class MathVerify:
    r"""Mathematical comparison of the response's answer, LaTeX or plain, with the ground truth.

    The answer of a ground truth is its last `\boxed{}`; without a box its formulas between `$`; without a formula the
    whole text, as LaTeX. A response without a readable answer is wrong. An error of the comparison itself is raised.
    The timeouts of the package are off, because a reward has a deadline anyway.
    """

    def __init__(self) -> None:
        """Import the package and its parser, so that the deadline of the first sample does not include the import.

        Raises:
            ConfigError: `math-verify` is not installed.
        """
        try:
            from math_verify import parse, verify
        except ImportError as error:
            raise ConfigError("the reward MathVerify needs: pip install 'math-verify[antlr4_9_3]'") from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # no warning about the timeouts
        self._parse, self._verify = parse, verify
        self("$1$", "1")

    def __call__(self, solution_str: str, ground_truth: object) -> float:
        """Return 1 if the answer in the response equals the ground truth.

        Raises:
            ValueError: the ground truth cannot be parsed.
        """
        text = _text_of(ground_truth)
        box = last_box(text, braced=True)
        if box or not (last_box(text) or _FORMULA.search(text)):
            # The package reads no dollar sign in a box, several boxes as a set, and boxes without braces well.
            text = f"\\boxed{{{(box[0] if box else text).replace(_DOLLAR, '')}}}"
        gold = self._read(text)
        if not gold:
            raise ValueError(f"math-verify cannot parse the ground truth {ground_truth!r}")
        try:
            answer = self._read(solution_str)
        except ValueError:
            # Python reads no whole number of more than 4,300 digits.
            return 0.0
        return float(self._verify(gold, answer, timeout_seconds=None, raise_on_error=True))

    def _read(self, text: str) -> list[Any]:
        # In plain text, the package does not read minus signs.
        return self._parse(with_hyphens(text), parsing_timeout=None, raise_on_error=True)
