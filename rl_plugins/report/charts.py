"""Charts of the report: the metrics that share a chart, the drawn points, and the picture.

A picture is a list of SVG shapes; the template of the page writes the SVG. Shapes have classes in place of colours. The
style sheet of the page gives each class a colour for light and for dark screens, so one picture serves both.
matplotlib's SVG has fixed colours in `style` attributes, and 27 kB for one curve of 300 values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import pairwise
from statistics import fmean, median

Points = Mapping[int, float]
"""Values of one metric by step."""
Series = Mapping[str, Points]
"""Points by the name of the metric."""

MAIN: dict[str, Sequence[str]] = {
    "Reward": ("val/reward", "train/reward"),
    "Several samples per prompt": ("val/*_at_[0-9]", "val/*_at_[0-9][0-9]", "val/*_at_[0-9][0-9][0-9]"),
    "Beside the reward": ("val/rewards/*", "train/rewards/*"),
    "Accuracy": ("val/accuracy", "train/accuracy"),
    "Loss": ("val/loss", "train/loss"),
    "Loss of the critic": ("train/critic/loss", "train/cost_critic/loss"),
    "Cost": ("train/cost", "train/cost_in_window"),
    "Multiplier of the cost": ("train/lambda",),
    "KL": ("train/kl", "train/ppo_kl"),
    "Entropy": ("train/entropy",),
    "Response length (tokens)": ("train/response_length",),
    "Turns of a conversation": ("train/turns",),
    "Truncated responses, groups of one score": ("train/truncated", "train/uniform_groups"),
    "Log-prob gap, trainer to sampler": ("train/rollout_gap", "train/rollout_gap_max"),
    "Gradient norm": ("train/gradient_norm", "train/*/gradient_norm"),
    "Clipped": ("train/clip_fraction", "train/dual_clip_fraction"),
    "Learning rate": ("train/lr", "train/*/lr"),
    "Samples per second": ("samples_per_s",),
    "Tokens per second": ("tokens_per_s",),
    "Model FLOPs utilization": ("throughput/mfu",),
    "Idle share of a step": ("idle/trainer", "idle/engine"),
    "Staleness (policies)": ("rollout/staleness", "rollout/staleness_max"),
    "Rollout engines": ("rollout/engines", "rollout/engines_lost"),
}
"""Title of a main chart to the patterns of its metrics."""

ELSEWHERE = ("time/*", "memory/*", "val/time/*", "val/memory/*", "train/reward_*", "system/*")
"""Metrics without a chart of their own: phases and failed rewards have sections, machine metrics are in MLflow."""

_LARGEST_GAP = 2.0
"""A curve breaks where the distance to the next value exceeds this multiple of the median distance."""


def main_curves(series: Series) -> dict[str, Series]:
    """Return the curves of each main chart for which the run has metrics, by the title of the chart."""
    charts = {title: _matching(series, patterns) for title, patterns in MAIN.items()}
    return {title: curves for title, curves in charts.items() if curves}


def other_curves(series: Series) -> dict[str, Series]:
    """Return a chart for each metric without a place in a main chart or in a section of the report."""
    placed = {name for curves in main_curves(series).values() for name in curves}
    placed |= set(_matching(series, ELSEWHERE))
    return {name: {name: points} for name, points in series.items() if name not in placed}


def _matching(series: Series, patterns: Sequence[str]) -> Series:
    return {name: series[name] for pattern in patterns for name in series if fnmatch(name, pattern)}


@dataclass(frozen=True)
class DrawnPoint:
    """One value, or the mean and the range of several neighbouring values."""

    step: float
    low: float
    mean: float
    high: float


def curve_segments(points: Points, max_points: int) -> list[list[DrawnPoint]]:
    """Break a curve at gaps, and thin a curve with more values than a chart can show.

    A gap is NaN, infinity, or a range of missing steps.

    Args:
        points: value by step, in ascending order of the steps.
        max_points: largest number of drawn points of all segments together. Each further segment may add one point.
    """
    segments = _unbroken_segments(points)
    # All segments of a curve are thinned by the same factor.
    size = max(1, math.ceil(sum(map(len, segments)) / max_points))
    return [[_drawn(part[at : at + size]) for at in range(0, len(part), size)] for part in segments]


def _unbroken_segments(points: Points) -> list[list[tuple[int, float]]]:
    distances = [after - before for before, after in pairwise(points)]
    largest = _LARGEST_GAP * median(distances) if distances else 0
    segments: list[list[tuple[int, float]]] = []
    last: int | None = None
    for step, value in points.items():
        if not math.isfinite(value):
            last = None
            continue
        if last is None or step - last > largest:
            segments.append([])
        segments[-1].append((step, value))
        last = step
    return segments


def _drawn(part: Sequence[tuple[int, float]]) -> DrawnPoint:
    values = [value for _, value in part]
    return DrawnPoint(fmean(step for step, _ in part), min(values), fmean(values), max(values))


# Pictures -----------------------------------------------------------------------------------------------------------

COLOURS = 8
"""Number of colours in the style sheet. The ninth curve of a chart has the first colour again."""

_WIDTH, _FULL_WIDTH, _HEIGHT, _BAR_HEIGHT = 420, 1280, 210, 40
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 24
_MAX_POINTS = 300
_MAX_DOTS = 60
"""A curve of at most this many values has a dot at each value. The tooltip of a dot shows the step and the value."""


@dataclass(frozen=True)
class Shape:
    """An SVG element.

    Attributes:
        tag: name of the element.
        attributes: attributes of the element.
        text: text inside the element.
        tooltip: text shown while the pointer is on the element.
    """

    tag: str
    attributes: Mapping[str, object]
    text: str = ""
    tooltip: str = ""


@dataclass
class Chart:
    """A picture with a caption and a legend.

    Attributes:
        caption: title above the picture.
        label: text for screen readers.
        width: width of the picture in SVG units.
        height: height of the picture in SVG units.
        shapes: shapes from back to front. The list is empty if there is no finite value.
        legend: name of each curve and a short text about the curve, in the order of the colours.
    """

    caption: str
    label: str
    width: int = _WIDTH
    height: int = _HEIGHT
    shapes: list[Shape] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def add(self, tag: str, *, text: str = "", tooltip: str = "", **attributes: object) -> None:
        """Add a shape in front of all others; `class_` stands for the attribute `class`."""
        named = {key.rstrip("_"): value for key, value in attributes.items()}
        self.shapes.append(Shape(tag, named, text, tooltip))


@dataclass(frozen=True)
class _Axes:
    """Linear map from steps and values to coordinates of a chart.

    Attributes:
        width: width of the chart.
        steps: first and last step.
        values: lowest and highest value.
    """

    width: int
    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        first, last = self.steps
        share = (step - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.values
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def points(self, places: Sequence[tuple[float, float]]) -> str:
        """Return coordinates in the form of the SVG attribute `points`."""
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in places)


def line_chart(title: str, curves: Series) -> Chart:
    """Draw curves over the steps; the legend has the last value of each curve.

    Args:
        title: caption of the chart.
        curves: points of each curve. NaN and infinity become gaps.
    """
    segments = {name: curve_segments(points, _MAX_POINTS) for name, points in curves.items()}
    drawn = [point for parts in segments.values() for part in parts for point in part]
    chart = Chart(title, title)
    if not drawn:
        chart.legend = [(name, "") for name in curves]
        return chart
    steps = min(point.step for point in drawn), max(point.step for point in drawn)
    axes = _add_axes(chart, steps, (min(point.low for point in drawn), max(point.high for point in drawn)))
    # The first curve is in front: a validation metric covers the noise of the training metric.
    for position, parts in reversed(list(enumerate(segments.values()))):
        few = sum(map(len, parts)) <= _MAX_DOTS
        for part in parts:
            _add_segment(chart, axes, part, f"c{position % COLOURS}", dots=few or len(part) == 1)
    for name, points in curves.items():
        last = max((step for step, value in points.items() if math.isfinite(value)), default=None)
        chart.legend.append((name, "" if last is None else short_number(points[last])))
    return chart


def _add_segment(chart: Chart, axes: _Axes, segment: Sequence[DrawnPoint], colour: str, *, dots: bool) -> None:
    if any(point.low < point.high for point in segment):
        outline = [(point.step, point.high) for point in segment]
        outline += [(point.step, point.low) for point in reversed(segment)]
        chart.add("polygon", points=axes.points(outline), class_=f"band {colour}")
    if len(segment) > 1:
        line = axes.points([(point.step, point.mean) for point in segment])
        chart.add("polyline", points=line, class_=f"line {colour}")
    if dots:
        for point in segment:
            tooltip = f"step {point.step:g}: {point.mean:.6g}"
            x, y = f"{axes.x(point.step):.1f}", f"{axes.y(point.mean):.1f}"
            chart.add("circle", tooltip=tooltip, cx=x, cy=y, r=2.5, class_=f"fill {colour}")


def area_chart(title: str, curves: Mapping[str, Points], steps: Sequence[int], unit: str) -> Chart:
    """Draw the parts of a sum at each step as areas on top of each other.

    Args:
        title: text before the unit in the caption.
        curves: points of each part. A step without a value counts as 0.
        steps: all steps of the chart, in ascending order.
        unit: unit of the values.
    """
    chart = Chart(f"{title} ({unit})", title, _FULL_WIDTH, legend=[(name, "") for name in curves])
    size = max(1, -(-len(steps) // _MAX_POINTS))
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    places = [sum(group) / len(group) for group in groups]
    bottom = [0.0] * len(groups)
    layers: list[tuple[str, list[float], list[float]]] = []
    for name, points in curves.items():
        means = [sum(points.get(step, 0.0) for step in group) / len(group) for group in groups]
        top = [below + mean for below, mean in zip(bottom, means, strict=True)]
        layers.append((name, bottom, top))
        bottom = top
    axes = _add_axes(chart, (places[0], places[-1]), (0.0, max(bottom)))
    for position, (name, below, above) in enumerate(layers):
        outline = [*zip(places, above, strict=True), *reversed(list(zip(places, below, strict=True)))]
        chart.add("polygon", tooltip=name, points=axes.points(outline), class_=f"fill c{position % COLOURS}")
    return chart


def stacked_bar(title: str, parts: Mapping[str, float], unit: str) -> Chart:
    """Draw one bar of the parts of a sum; the legend has the value and the share of each part.

    Args:
        title: text before the sum in the caption.
        parts: value of each part.
        unit: unit of the values.
    """
    total, left = sum(parts.values()), 0.0
    chart = Chart(f"{title}: {total:.3g} {unit}", title, _FULL_WIDTH, _BAR_HEIGHT)
    for position, (name, value) in enumerate(parts.items()):
        width = value / total * _FULL_WIDTH
        chart.add(
            "rect", tooltip=f"{name}: {value:.4g} {unit} ({value / total:.0%})", x=f"{left:.2f}", y=6,
            width=f"{width:.2f}", height=28, class_=f"fill c{position % COLOURS}",
        )  # fmt: skip
        left += width
        chart.legend.append((name, f"{value:.3g} {unit}, {value / total:.0%}"))
    return chart


def _add_axes(chart: Chart, steps: tuple[float, float], values: tuple[float, float]) -> _Axes:
    """Add grid lines and the numbers of both axes to an empty chart."""
    low, high = values
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    axes = _Axes(chart.width, steps, (low, high))
    for value in ticks(low, high, 5):
        y = f"{axes.y(value):.1f}"
        chart.add("line", x1=_LEFT, x2=chart.width - _RIGHT, y1=y, y2=y, class_="grid")
        chart.add("text", text=short_number(value), x=_LEFT - 6, y=y, class_="value")
    for step in ticks(*steps, 6, whole=True):
        chart.add("text", text=f"{step:g}", x=f"{axes.x(step):.1f}", y=_HEIGHT - 6, class_="step")
    return axes


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Return about `count` round numbers between `low` and `high`.

    Args:
        low: lower end of the axis.
        high: upper end of the axis. If it does not exceed `low`, the only tick is `low`.
        count: approximate number of ticks.
        whole: return whole numbers only.
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        unit = max(1.0, unit)
    first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
    return [number * unit for number in range(first, last + 1)]


def short_number(value: float) -> str:
    """Return a number with three significant digits, or with thousands separators from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
