from __future__ import annotations

import pytest

from benchmarks.soak import MEMORY, STEP, slope, table


def test_slope_is_the_growth_per_100_steps_after_the_warm_up() -> None:
    # The jump in the first fifth does not count.
    points = [(float(step), 50.0 if step <= 20 else 100 + 0.5 * step) for step in range(101)]
    assert slope(points, 100) == pytest.approx(50)
    assert slope(points[:25], 100) == pytest.approx(50)
    assert slope(points[:21], 100) == 0 and slope([(30.0, 1.0), (30.0, 2.0)], 100) == 0


def test_table_has_a_line_for_each_figure() -> None:
    seen = {("driver", MEMORY): [(25.0, 10.0), (50.0, 12.0)], ("all", STEP): [(25.0, 0.5), (50.0, 0.5)]}
    assert table(seen, 100).splitlines()[2:] == [
        "| all | step, s | 0.5 | 0.5 | +0 |", "| driver | memory, MB | 10 | 12 | +8 |"
    ]  # fmt: skip
