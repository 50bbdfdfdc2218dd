"""A function that checks input, and the outcomes of inputs."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from rl_plugins.errors import UserError

OUTCOMES = ("clear", "accepted", "unclear", "traceback", "wrongly accepted")
_LONGEST = 1000
_LONGEST_SHOWN = 300


@dataclass
class Report:
    """Outcomes of a target.

    Attributes:
        counts: number of inputs, by outcome.
        faults: one input for each fault, by the place of the fault.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A function that checks input.

    Attributes:
        inputs: strategy of the input.
        check: function of an input. It raises a UserError for bad input, and an AssertionError for bad input that the
            tested function has accepted.
        things: words of which a clear message has one: names of files or options.
    """

    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], object]
    things: Sequence[str]

    def run(self, report: Report, examples: int, number: int) -> None:
        """Try some inputs, and add the outcomes to the report.

        Args:
            report: report of the target.
            examples: number of inputs.
            number: seed of the inputs.
        """

        @seed(number)
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(self.inputs)
        def try_one(given_input: Any) -> None:
            outcome, place = self._outcome(deepcopy(given_input))
            report.counts[outcome] += 1
            if place:
                report.faults.setdefault(f"{outcome}: {place}", repr(given_input)[:_LONGEST_SHOWN])

        try_one()

    def _outcome(self, given_input: Any) -> tuple[str, str]:
        """Return the outcome, and the place of the fault."""
        try:
            with warnings.catch_warnings(action="ignore"):
                self.check(given_input)
        except UserError as error:
            message = str(error)
            is_line = message.isprintable() and 10 < len(message) < _LONGEST
            if is_line and any(word in message for word in self.things):
                return "clear", ""
            return "unclear", f"{message[:_LONGEST_SHOWN]!r} from {_place(error)}"
        except AssertionError as error:
            return "wrongly accepted", str(error)
        except Exception as error:
            return "traceback", f"{type(error).__name__} at {_place(error)}"
        return "accepted", ""


def _place(error: BaseException) -> str:
    """Return file and line of the last frame of the project."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "rl_plugins" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
