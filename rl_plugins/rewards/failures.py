"""Failures are counted for the metrics, and too many of them end the run with the commonest reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from rl_plugins.rewards.records import Failure, Score


class RewardFailureError(RuntimeError):
    """More rewards failed than `max_failure_rate` allows."""


def failure_counts(scores: Sequence[Score]) -> dict[str, int]:
    """Count the failures of each kind; every kind is a key, so that all ranks log the same metrics."""
    counts = Counter(score.failure for score in scores)
    return {kind: counts[kind] for kind in get_args(Failure)}


def check_failure_rate(
    scores: Sequence[Score | None], max_failure_rate: float, num_requests: int | None = None
) -> None:
    """Raise if more than `max_failure_rate` (0 to 1) of the scores failed.

    Args:
        scores: One entry per request; None for a request not scored yet, which counts as not failed.
        max_failure_rate: 0 tolerates no failure, 1 tolerates all.
        num_requests: where `scores` are not all, how many there are to be.

    Raises:
        RewardFailureError: Says how many of how many failed, and the most frequent reason with one example.
    """
    failed = [score for score in scores if score is not None and score.failure is not None]
    total = len(scores) if num_requests is None else num_requests
    if len(failed) <= max_failure_rate * total:
        return
    kind, count = Counter(score.failure for score in failed).most_common(1)[0]
    example = next(score.message for score in failed if score.failure == kind)
    raise RewardFailureError(
        f"{len(failed)} of {total} rewards failed, more than max_failure_rate={max_failure_rate:g} "
        f"allows; most often: {kind} ({count} times), for example: {example}"
    )
