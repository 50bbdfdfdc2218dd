from __future__ import annotations

import math

from rl_plugins.report.curves import DrawnPoint, curve_segments


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
