"""What a reward function returned or raised, read strictly: finite numbers, a reply, or a recorded failure."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Any

from rl_plugins.rewards.records import Failure, Score

_MESSAGE_LIMIT = 500


def failed(failure: Failure, message: str) -> Score:
    """The Score of a failure; the message is cut at 500 characters."""
    return Score(value=None, failure=failure, message=message[:_MESSAGE_LIMIT])


def read_scores(outcome: Any, name: str, batch: int | None) -> list[Score]:
    """Turn the outcome of one call into scores.

    Args:
        outcome: What the function returned, or the exception it raised. A result is a number (a 0-d array or
            tensor too) or a mapping with "score" and further numbers; of a batched call, a list of results.
        name: The reward's name, for messages.
        batch: The number of samples of a batched call, None for a call with one sample.
    """
    if isinstance(outcome, BaseException):
        return [failed("raised", f"{name}: {_describe(outcome)}")] * (batch or 1)
    if batch is None:
        return [_read_score(outcome, name)]
    results = outcome.tolist() if hasattr(outcome, "tolist") else outcome
    if not isinstance(results, list | tuple):
        return [failed("raised", f"{name}: a batched reward returns a list, not {_type(results)}")] * batch
    if len(results) != batch:
        return [failed("raised", f"{name}: returned {len(results)} results for {batch} samples")] * batch
    return [_read_score(result, name) for result in results]


def _read_score(result: Any, name: str) -> Score:
    if isinstance(result, str):
        return Score(None, reply={"role": "user", "content": result})
    if isinstance(result, Mapping) and {"role", "content"} <= result.keys():
        if not isinstance(result["content"], str):
            return failed("raised", f"{name}: the content of its answer is {_type(result['content'])}, not text")
        return Score(None, reply=dict(result))
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    if "score" not in values:
        return failed("raised", f"{name}: the returned mapping has no 'score', only {list(map(str, values))}")
    numbers = {}
    for key, value in values.items():
        number = value.item() if getattr(value, "ndim", None) == 0 else value
        if not isinstance(number, int | float):
            return failed("raised", f"{name}: {str(key)!r} is {_type(number)}, not a number")
        if not abs(number) <= sys.float_info.max:
            shown = number if isinstance(number, float) else "too large for a float"
            return failed("not_finite", f"{name}: {str(key)!r} is {shown}")
        numbers[str(key)] = float(number)
    return Score(value=numbers.pop("score"), details=numbers)


def _type(value: Any) -> str:
    return f"of type {type(value).__name__}"


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip()[: _MESSAGE_LIMIT // 2] + place
