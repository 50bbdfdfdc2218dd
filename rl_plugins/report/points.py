"""Points of a curve, made ready to be drawn: broken at gaps, thinned where there are more than a picture shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

Points = Mapping[int, float]

_GAP = 2.0
"""A line breaks where the next value is further away than this many usual distances."""


@dataclass(frozen=True)
class Mark:
    """What is drawn at one place: a value, or the mean of neighbours and how far they reach."""

    step: float
    low: float
    mean: float
    high: float


def marks(points: Points, limit: int) -> list[list[Mark]]:
    """The stretches of a curve.

    A curve is broken where a value is no finite number, and where values are missing.

    Args:
        points: value by step, in order.
        limit: marks that the curve has at most, apart from those that begin a stretch.
    """
    stretches = _stretches(points)
    # Of the steps, not of each stretch: all parts of a curve are thinned alike.
    size = max(1, math.ceil(sum(map(len, stretches)) / limit))
    return [[_mark(part[at : at + size]) for at in range(0, len(part), size)] for part in stretches]


def _stretches(points: Points) -> list[list[tuple[int, float]]]:
    distances = [after - before for before, after in pairwise(points)]
    widest = _GAP * median(distances) if distances else 0
    stretches: list[list[tuple[int, float]]] = []
    last: int | None = None
    for step, value in points.items():
        if not math.isfinite(value):
            last = None
            continue
        if last is None or step - last > widest:
            stretches.append([])
        stretches[-1].append((step, value))
        last = step
    return stretches


def _mark(part: Sequence[tuple[int, float]]) -> Mark:
    values = [value for _, value in part]
    return Mark(fmean(step for step, _ in part), min(values), fmean(values), max(values))


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """About `count` round numbers between two; with `whole`, whole ones."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        unit = max(1.0, unit)
    first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
    return [number * unit for number in range(first, last + 1)]


def number(value: float) -> str:
    """A number that is short to read."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
