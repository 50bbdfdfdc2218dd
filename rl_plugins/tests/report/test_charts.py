from __future__ import annotations

import pytest

from rl_plugins.report.charts import short_number, ticks


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
