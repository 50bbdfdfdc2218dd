"""Ranks and engines as two rows of the same length, laid side by side: who works with whom, for any two numbers."""

from __future__ import annotations


def beside(place: int, here: int, there: int) -> range:
    """The places of the other row that lie beside one of this row.

    Args:
        place: in this row.
        here: places of this row.
        there: places of the other row.
    """
    return range(place * there // here, -(-(place + 1) * there // here))


def shares(rank: int, ranks: int, engines: int, count: int) -> dict[int, range]:
    """Which of `count` prompts of a rank go to each engine beside it, so that all engines get about as many."""
    parts = {engine: range(0) for engine in beside(rank, ranks, engines)}
    for prompt in range(count):
        # Where the middle of the prompt lies, counted in halves of a prompt over the row of all ranks.
        engine = (2 * (rank * count + prompt) + 1) * engines // (2 * count * ranks)
        parts[engine] = range(parts[engine].start if parts[engine] else prompt, prompt + 1)
    return parts
