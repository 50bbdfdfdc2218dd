"""Ready-made scorers for answers that can be checked. 1.0 is right, 0.0 wrong; a bad ground truth raises."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from rl_plugins.errors import ConfigError

_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")


def exact_match(solution_str: str, ground_truth: Any, ignore_case: bool = False) -> float:
    """Whether the response is the ground truth, apart from white space at both ends."""
    given, wanted = solution_str.strip(), str(ground_truth).strip()
    return float(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


def correct_and_format(
    solution_str: str, ground_truth: Any, pattern: str = r"\s*[-+]?\d+\s*", format_weight: float = 0.5
) -> dict[str, float]:
    """Whether the response is the ground truth, and whether it has the form of an answer at all.

    Returns:
        `correct` and `format`, 0 or 1 each, and `score = correct + format_weight format`.
    """
    correct, formatted = exact_match(solution_str, ground_truth), float(bool(re.fullmatch(pattern, solution_str)))
    return {"score": correct + format_weight * formatted, "correct": correct, "format": formatted}


def final_answer(solution_str: str, ground_truth: Any, require_marker: bool = False) -> float:
    """Whether the response's final number is the ground truth's, as in GSM8K.

    The final number is the one after the last "####"; without that marker it is the last number of the text,
    or, with `require_marker`, there is none and the response is wrong. Thousands separators are dropped, and
    numbers are compared by value (18 is 18.00).

    Raises:
        ValueError: The ground truth holds no number.
    """
    wanted = _final_number(str(ground_truth), require_marker=False)
    if wanted is None:
        raise ValueError(f"the ground truth {ground_truth!r} holds no number")
    return float(_final_number(solution_str, require_marker) == wanted)


def _final_number(text: str, require_marker: bool) -> Decimal | None:
    _, marker, tail = text.rpartition("####")
    if require_marker and not marker:
        return None
    numbers = _NUMBER.findall(tail)
    if not numbers:
        return None
    return Decimal((numbers[0] if marker else numbers[-1]).replace(",", ""))


class MathVerify:
    r"""Whether the response's answer, LaTeX or plain, equals the ground truth mathematically.

    A ground truth without `$` or `\boxed` is taken as LaTeX. A response without a recognisable answer is
    wrong; an error of the comparison itself is raised. The package's own timeouts are off: the scorer's
    deadline does their work.
    """

    def __init__(self) -> None:
        """Import the package and its parser now, so that no sample's deadline pays for it.

        Raises:
            ConfigError: `math-verify` is not installed.
        """
        try:
            from math_verify import parse, verify
        except ImportError as error:
            raise ConfigError("the reward MathVerify needs: pip install 'math-verify[antlr4_9_3]'") from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
        self._parse, self._verify = parse, verify
        self("$1$", "1")

    def __call__(self, solution_str: str, ground_truth: Any) -> float:
        """Score one response.

        Raises:
            ValueError: The ground truth cannot be parsed.
        """
        text = str(ground_truth)
        gold = self._read(text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}")
        if not gold:
            raise ValueError(f"math-verify cannot parse the ground truth {ground_truth!r}")
        answer = self._read(solution_str)
        return float(self._verify(gold, answer, timeout_seconds=None, raise_on_error=True))

    def _read(self, text: str) -> list[Any]:
        return self._parse(text, parsing_timeout=None, raise_on_error=True)
