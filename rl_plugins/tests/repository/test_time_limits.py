"""A test over the limit of its tier fails, at any speed of the machine."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from rl_plugins.tests import patience, time_limits

SLOW = """
import time

import pytest


@pytest.fixture(scope="module")
def shared():
    time.sleep({shared_s})


@pytest.fixture
def own(shared):
    time.sleep(0.0)


@pytest.mark.unit
def test_slow(own):
    time.sleep({slow_s})


@pytest.mark.integration
def test_slow_of_another_tier():
    time.sleep(0.05)
"""


def outcomes(pytester: pytest.Pytester, slow_s: float = 0.05, shared_s: float = 0.0) -> tuple[dict[str, int], str]:
    pytester.makepyfile(test_seconds=SLOW.format(slow_s=slow_s, shared_s=shared_s))
    pytester.makeini("[pytest]\nmarkers =\n  unit: fast\n  integration: slower\n")
    result = pytester.runpytest_inprocess("-p", "rl_plugins.tests.time_limits", "-p", "no:cacheprovider")
    return result.parseoutcomes(), result.stdout.str()


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "LIMITS_S", {"unit": 0.01, "integration": 60.0})
    monkeypatch.setattr(time_limits, "slowdown", lambda: 1.0)
    monkeypatch.setattr(time_limits, "MARGIN", 1.0)


def test_test_over_the_limit_of_the_tier_fails(pytester: pytest.Pytester) -> None:
    counts, output = outcomes(pytester)
    assert counts == {"passed": 2, "errors": 1}
    assert "test_seconds.py::test_slow took" in output and "its limit is 0.01 s" in output


def test_test_that_was_late_once_passes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine stands still in the first run, and is as fast as before when its speed is measured.
    monkeypatch.setattr(time_limits, "LIMITS_S", {"unit": 2.0})
    pytester.makepyfile(test_seconds="import time\ntimes = iter([2.1, 0])\ndef test_a(): time.sleep(next(times))\n")
    result = pytester.runpytest_inprocess("-p", "rl_plugins.tests.time_limits", "-p", "no:cacheprovider")
    assert result.parseoutcomes() == {"passed": 1}


def run_of(pytester: pytest.Pytester, test: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_seconds=test)
    return pytester.runpytest_inprocess("-p", "rl_plugins.tests.time_limits", "-p", "no:cacheprovider", *options)


LATE_TWICE = """
import signal
import time

times = iter([2.1, 0.3])


def test_a():
    # One timer for both runs has at most 27.9 s left in the second run.
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 28.5
    time.sleep(next(times))
"""


def test_second_run_of_a_late_test_has_the_whole_timeout(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "TIME_SCALE", 1.0)
    monkeypatch.setattr(time_limits, "LIMITS_S", {"unit": 0.2})
    result = run_of(pytester, LATE_TWICE, "--timeout", "30")
    assert result.parseoutcomes() == {"passed": 1, "errors": 1}
    shown = result.stdout.str()
    assert "test_seconds.py::test_a took" in shown and "The test ran once more" not in shown


def test_late_test_fails_if_the_second_run_fails(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "LIMITS_S", {"unit": 0.2})
    result = run_of(pytester, "import time\ntimes = iter([0.3])\ndef test_a(): time.sleep(next(times))\n")
    assert result.parseoutcomes() == {"passed": 1, "errors": 1}
    shown = result.stdout.str()
    assert (
        shown.index("test_a took") < shown.index("The test ran once more, and failed:") < shown.index("StopIteration")
    )


@pytest.mark.parametrize(("option", "seconds"), [([], 90), (["--timeout", "7"], 21), (["--timeout", "0"], 0)])
def test_scale_of_deadlines_multiplies_the_timeout_of_the_configuration_and_of_the_command(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, option: list[str], seconds: int
) -> None:
    monkeypatch.setattr(time_limits, "LIMITS_S", {"unit": 60.0})
    monkeypatch.setattr(patience, "TIME_SCALE", 3.0)
    monkeypatch.delenv("PYTEST_TIMEOUT", raising=False)
    pytester.makeini("[pytest]\ntimeout = 30\n")
    test = f"def test_a(pytestconfig): assert pytestconfig._env_timeout == {seconds}\n"
    assert run_of(pytester, test, *option).parseoutcomes() == {"passed": 1}


LAST_WITH_RAY = """
import time

import pytest
import ray

times = iter([2.1, 0.0])


@pytest.fixture(scope="session")
def running_ray():
    return None


def test_last(running_ray):
    time.sleep(next(times))
    assert not ray.shutdown.called


def test_without_ray():
    assert ray.shutdown.called
"""


def test_resident_ray_runs_for_the_second_run_of_the_last_test_with_ray(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.shutdown", Mock())
    monkeypatch.setattr(time_limits, "LIMITS_S", {"unit": 2.0})
    pytester.makeconftest("from integration_tests.resident import pytest_runtest_protocol\n")
    assert run_of(pytester, LAST_WITH_RAY).parseoutcomes() == {"passed": 2}


def test_shared_fixture_has_a_separate_limit(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "LIMITS_S", {"unit": 0.5, "integration": 60.0})
    monkeypatch.setattr(time_limits, "STILL_S", 0.5)
    counts, output = outcomes(pytester, slow_s=0.0, shared_s=1.1)
    assert counts == {"passed": 2, "errors": 1}
    assert "the fixture test_seconds.py::shared took" in output and "test_slow took" not in output


def test_limit_grows_with_the_slowdown_of_the_machine(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "slowdown", lambda: 1e4)
    assert outcomes(pytester)[0] == {"passed": 2}


def test_margin_multiplies_the_limits(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "MARGIN", 1e4)
    assert outcomes(pytester)[0] == {"passed": 2}


def test_allowed_test_may_take_the_seconds_given_with_the_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "ALLOWED", {"test_seconds.py::test_slow": (60.0, "sleeps")})
    assert outcomes(pytester)[0] == {"passed": 2}


def test_slowdown_is_at_least_1() -> None:
    assert time_limits.slowdown() >= 1


def test_allowed_names_existing_tests(root: Path) -> None:
    for name in time_limits.ALLOWED:
        file, test = name.split("::")
        assert f"def {test.partition('[')[0]}(" in (root / file).read_text(encoding="utf-8"), name
