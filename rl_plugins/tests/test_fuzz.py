"""Random bad input gets one clear line, and is never accepted with numbers that are not finite (`fuzz`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.config.data import BatchConfig
from rl_plugins.errors import ConfigError
from rl_plugins.tests.fuzz.inputs import VALUES
from rl_plugins.tests.fuzz.runs import fuzz, fuzz_in_processes
from rl_plugins.tests.fuzz.target import Report, Target


def test_fuzz_finds_only_clear_lines_and_valid_input(tmp_path: Path) -> None:
    reports = fuzz(tmp_path, examples=6)
    assert {name: report.faults for name, report in reports.items() if report.faults} == {}
    assert all(report.counts.total() >= 3 for report in reports.values())


@pytest.mark.extended
def test_fuzz_finds_only_clear_lines_and_valid_input_in_two_minutes() -> None:
    reports = fuzz_in_processes(2, seconds=60)
    assert {name: report.faults for name, report in reports.items() if report.faults} == {}


def refuses_all(value: object) -> None:
    raise ConfigError("option: fault: way out")


def refuses_at_length(value: object) -> None:
    raise ConfigError("option: " + "x" * 2000)


def names_nothing(value: object) -> None:
    raise ConfigError("something is wrong somewhere")


def fails(value: object) -> None:
    BatchConfig(prompts_per_step=len(0))  # type: ignore[arg-type]


def accepts_infinity(value: object) -> None:
    raise AssertionError("optimizer.lr is not finite")


def test_target_tells_the_outcomes_apart() -> None:
    for check, outcome, faults in (
        (refuses_all, "clear", 0),
        (lambda value: None, "accepted", 0),
        (refuses_at_length, "unclear", 1),
        (names_nothing, "unclear", 1),
        (fails, "traceback", 1),
        (accepts_infinity, "wrongly accepted", 1),
    ):
        report = Report()
        Target(VALUES, check, ["option"]).run(report, 5, 0)
        assert set(report.counts) == {outcome} and len(report.faults) == faults
