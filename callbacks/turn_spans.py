"""Spans of the turns of a conversation in a trace of MLflow: of each response, tool call and environment step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import LiveSpan

Turns = Sequence[Mapping[str, Any]]


def limits_ns(turns: Turns) -> tuple[int | None, int | None]:
    """Return start and end of a conversation in ns of Unix time; None, which is now, without turns."""
    return (_ns(turns[0]["start"]), _ns(turns[-1]["end"])) if turns else (None, None)


def add_turn_spans(parent: LiveSpan, turns: Turns) -> None:
    """Log each turn as a span of the policy, followed by spans of the environment.

    Args:
        parent: span of the conversation.
        turns: turns, as `timed_turns` returns them.
    """
    for number, turn in enumerate(turns, start=1):
        sampled = turn["start"] + turn["sampling_s"]
        _add(parent, "policy", "LLM", turn["start"], sampled, {"turn": number}, turn["messages"], turn["response"])
        for work in turn["work"] or [{"name": "environment", "start": sampled, "seconds": turn["environment_s"]}]:
            attributes = {"turn": number, "queue_s": turn["queue_s"]}
            _add(parent, work["name"], "TOOL", work["start"], work["start"] + work["seconds"], attributes)


def _add(
    parent: LiveSpan,
    name: str,
    kind: str,
    start: float,
    end: float,
    attributes: dict[str, Any],
    messages: object = None,
    response: object = None,
) -> None:
    import mlflow

    span = mlflow.start_span_no_context(
        name,
        span_type=kind,
        parent_span=parent,
        inputs=None if messages is None else {"messages": messages},
        attributes=attributes,
        start_time_ns=_ns(start),
    )
    span.end(outputs=None if response is None else {"response": response}, end_time_ns=_ns(end))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
