"""Pictures as inline SVG: they take their colours from the page, so that light and dark are the same picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rl_plugins.report.markup import Node, node
from rl_plugins.report.points import Mark, Points, marks, number, ticks

COLOURS = 8
"""The style sheet has as many; further curves begin anew."""

_WIDTH, _WIDE, _HEIGHT = 420, 1280, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 24
_MARKS = 300
_DOTS = 60
"""Curves of fewer values have a dot at each, which says its value when the pointer is on it."""


@dataclass(frozen=True)
class _Axes:
    """Where a value is on the picture."""

    x: Callable[[float], float]
    y: Callable[[float], float]


def line_chart(title: str, curves: Mapping[str, Points]) -> Node:
    """Curves over the steps in one picture, with a legend that says the last value of each."""
    drawn = {name: marks(points, _MARKS) for name, points in curves.items()}
    every = [mark for stretches in drawn.values() for stretch in stretches for mark in stretch]
    if not every:
        return _figure(title, node("p", "no finite value"), [(name, "") for name in curves])
    low, high = min(mark.low for mark in every), max(mark.high for mark in every)
    picture, axes = _axes(title, (min(m.step for m in every), max(m.step for m in every)), (low, high))
    # The first on top: validations over the noise of training.
    for position, stretches in reversed(list(enumerate(drawn.values()))):
        few = sum(map(len, stretches)) <= _DOTS
        for stretch in stretches:
            _draw_stretch(picture, axes, stretch, position % COLOURS, dots=few or len(stretch) == 1)
    legend = [(name, number(stretches[-1][-1].mean) if stretches else "") for name, stretches in drawn.items()]
    return _figure(title, picture, legend)


def _draw_stretch(picture: Node, axes: _Axes, stretch: Sequence[Mark], colour: int, *, dots: bool) -> None:
    if any(mark.low < mark.high for mark in stretch):
        around = [(mark.step, mark.high) for mark in stretch] + [(mark.step, mark.low) for mark in reversed(stretch)]
        picture.append(node("polygon", points=_points(axes, around), class_=f"band c{colour}"))
    if len(stretch) > 1:
        line = _points(axes, [(mark.step, mark.mean) for mark in stretch])
        picture.append(node("polyline", points=line, class_=f"line c{colour}"))
    if dots:
        for mark in stretch:
            said = node("title", f"step {mark.step:g}: {mark.mean:.6g}")
            at = {"cx": f"{axes.x(mark.step):.1f}", "cy": f"{axes.y(mark.mean):.1f}"}
            picture.append(node("circle", said, **at, r=2.5, class_=f"fill c{colour}"))


def area_chart(title: str, curves: Mapping[str, Points], steps: Sequence[int], unit: str) -> Node:
    """What adds up to a whole at every step, laid on top of each other; what a step does not have counts as 0."""
    size = max(1, -(-len(steps) // _MARKS))
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    places = [sum(group) / len(group) for group in groups]
    base = [0.0] * len(groups)
    layers: list[tuple[str, list[float], list[float]]] = []
    for name, points in curves.items():
        means = [sum(points.get(step, 0.0) for step in group) / len(group) for group in groups]
        top = [below + mean for below, mean in zip(base, means, strict=True)]
        layers.append((name, base, top))
        base = top
    picture, axes = _axes(title, (places[0], places[-1]), (0.0, max(base)), _WIDE)
    for position, (name, bottom, top) in enumerate(layers):
        around = [*zip(places, top, strict=True), *reversed(list(zip(places, bottom, strict=True)))]
        area = node("polygon", node("title", name), points=_points(axes, around), class_=f"fill c{position % COLOURS}")
        picture.append(area)
    return _figure(f"{title} ({unit})", picture, [(name, "") for name in curves])


def stacked_bar(title: str, parts: Mapping[str, float], unit: str) -> Node:
    """One bar of the parts of a whole."""
    whole, at = sum(parts.values()), 0.0
    picture = node("svg", viewBox=f"0 0 {_WIDE} 40", role="img", aria_label=title)
    for position, (name, value) in enumerate(parts.items()):
        width = value / whole * _WIDE
        said = node("title", f"{name}: {value:.4g} {unit} ({value / whole:.0%})")
        kind = f"fill c{position % COLOURS}"
        picture.append(node("rect", said, x=f"{at:.2f}", y=6, width=f"{width:.2f}", height=28, class_=kind))
        at += width
    legend = [(name, f"{value:.3g} {unit}, {value / whole:.0%}") for name, value in parts.items()]
    return _figure(f"{title}: {whole:.3g} {unit}", picture, legend)


def _axes(
    title: str, steps: tuple[float, float], values: tuple[float, float], wide: int = _WIDTH
) -> tuple[Node, _Axes]:
    """An empty picture with its axes."""
    (first, last), (low, high) = steps, values
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    width, height = wide - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    axes = _Axes(
        x=lambda step: _LEFT + ((step - first) / (last - first) if last > first else 0.5) * width,
        y=lambda value: _TOP + (high - value) / (high - low) * height,
    )
    picture = node("svg", viewBox=f"0 0 {wide} {_HEIGHT}", role="img", aria_label=title)
    for value in ticks(low, high, 5):
        y = f"{axes.y(value):.1f}"
        picture.append(node("line", x1=_LEFT, x2=wide - _RIGHT, y1=y, y2=y, class_="grid"))
        picture.append(node("text", number(value), x=_LEFT - 6, y=y, class_="value"))
    for step in ticks(first, last, 6, whole=True):
        picture.append(node("text", f"{step:g}", x=f"{axes.x(step):.1f}", y=_HEIGHT - 6, class_="step"))
    return picture, axes


def _points(axes: _Axes, places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in places)


def _figure(title: str, picture: Node, legend: Sequence[tuple[str, str]]) -> Node:
    keys = [
        node("span", node("i", class_=f"key c{position % COLOURS}"), f"{name} ", node("b", value))
        for position, (name, value) in enumerate(legend)
    ]
    return node("figure", node("figcaption", title), picture, node("div", *keys, class_="legend"))
