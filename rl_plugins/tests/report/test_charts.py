from __future__ import annotations

import math

import pytest

from rl_plugins.report.charts import DrawnPoint, curve_segments, line_chart, short_number, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3e-5, 3e-5, [-2e-5, 0.0, 2e-5]), (7.0, 7.0, [7.0])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_ticks_of_steps_are_whole_numbers() -> None:
    assert ticks(0, 3, 6, whole=True) == [0, 1, 2, 3]


def test_short_number_formats_short_texts() -> None:
    assert [short_number(value) for value in (0.12345, 15664.2, -1e-7)] == ["0.123", "15,664", "-1e-07"]


def test_curve_segments_break_at_missing_and_nan_values() -> None:
    points = {1: 1.0, 2: 2.0, 3: math.nan, 4: 4.0, 5: 5.0, 9: 9.0}
    steps = [[point.step for point in segment] for segment in curve_segments(points, max_points=100)]
    assert steps == [[1, 2], [4, 5], [9]]


def test_curve_segments_join_validations_that_are_far_apart() -> None:
    segments = curve_segments({0: 0.1, 25: 0.2, 50: 0.3, 60: 0.4}, max_points=100)
    assert [len(segment) for segment in segments] == [4]


def test_curve_segments_of_a_thinned_curve_keep_the_range_of_values() -> None:
    assert curve_segments(dict.fromkeys(range(100), 0.0) | {51: 1.0}, max_points=2) == [
        [DrawnPoint(24.5, 0.0, 0.0, 0.0), DrawnPoint(74.5, 0.0, 0.02, 1.0)]
    ]


def test_legend_of_a_line_chart_has_the_last_value_of_a_thinned_curve() -> None:
    points = {step: float(step) for step in range(1000)}
    assert line_chart("x", {"a": points, "b": {**points, 999: math.nan}}).legend == [("a", "999"), ("b", "998")]
