"""Pytest plugin that keeps tests fast: a test over the limit of its tier fails, unless `ALLOWED` gives a reason.

The seconds of a test are the seconds of its set-up, call and teardown. A fixture of several tests has a limit of its
own, the limit of a test of the tier, so the order of the tests changes no outcome. A slow or busy machine changes no
outcome either: the limit of a test over its limit is multiplied by the slowdown of the machine at this moment. A
machine that stood still for a while is no longer slow then, so a late test runs once more, and fails if the second run
is late again or fails. A shared fixture cannot run again, so its limit has `STILL_S` on top.

Each of the two runs has the whole timeout of pytest-timeout, which `TEST_TIME_SCALE` multiplies.

A start of a process, and the first reading of a file, can be later than the slowdown of a computation says. So
`make test`, which decides about a change on any machine, multiplies all limits by 3 (`TEST_TIME_MARGIN`). Neither
`make test-all` nor pytest alone multiplies limits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from rl_plugins.tests.patience import patient

LIMITS_S = {"unit": 5.0, "integration": 60.0, "gpu": 600.0}
"""Largest seconds of a test in a tier."""
MARGIN = float(os.environ.get("TEST_TIME_MARGIN", "1"))
"""Factor of every limit."""
ALLOWED: dict[str, tuple[float, str]] = {
    "rl_plugins/tests/test_fuzz.py::test_fuzz_finds_only_clear_lines_and_valid_input_in_two_minutes": (
        90.0,
        "random input for a minute in each of two processes",
    ),
    "rl_plugins/tests/callbacks/test_compiled_blocks.py::test_compiled_blocks_train_to_the_same_weights[fsdp-2-1]": (
        30.0,
        "torch.compile traces the same block in two ranks at once",
    ),
    "rl_plugins/tests/environments/test_tool_host.py::test_process_that_keeps_no_deadline_is_killed": (
        15.0,
        "a process of the tools starts three times, and imports transformers for the schemas",
    ),
    "rl_plugins/tests/repository/test_site.py::test_site_has_a_page_for_every_file_of_docs": (
        10.0,
        "builds the whole site",
    ),
    "rl_plugins/tests/test_gpu_cases.py::test_cases_of_all_sections_run_on_cpu": (
        10.0,
        "a training in each section of the program",
    ),
    "integration_tests/test_colocated_layout.py::"
    "test_engines_on_the_devices_of_all_workers_train_the_same_policy_also_after_a_kill": (
        180.0,
        "two runs, and one of the two has ten processes that load libraries",
    ),
    "integration_tests/test_gpu_binding.py::"
    "test_engines_on_8_machines_of_8_gpus_see_the_gpus_that_ray_gives_to_their_ranks": (
        240.0,
        "64 training workers and 40 engines start, each in a process",
    ),
    "integration_tests/test_images.py::test_ppo_trains_resumes_and_exports_a_vision_language_model": (
        120.0,
        "three runs, two of which have a cluster",
    ),
    "integration_tests/test_judge_engine.py::test_run_starts_an_engine_for_the_judge_and_waits_for_a_killed_server": (
        120.0,
        "the server of the judge starts twice",
    ),
    "integration_tests/test_lost_engine.py::"
    "test_killed_engine_and_then_hung_engine_are_replaced_while_the_other_works": (
        180.0,
        "one run loses an engine twice, and waits twice until another engine has started",
    ),
    "integration_tests/test_many_machines.py::"
    "test_run_waits_for_machines_moves_before_an_announced_loss_and_outlives_a_kill": (
        240.0,
        "Ray notices a killed machine after a while, three times, and the workers start again",
    ),
    **{
        "integration_tests/test_model_families.py::"
        f"test_family_trains_and_engines_have_the_weights_of_the_policy[{family}]": (
            120.0,
            "four runs of a model, with a cluster and an engine of their own",
        )
        for family in ("gemma2", "qwen2_moe", "gpt_oss")
    },
    "integration_tests/test_ray_job.py::test_submitted_job_is_stopped_by_ctrl_c_and_resumed_as_a_ray_job": (
        150.0,
        "a head node of Ray starts, and two jobs, each of which starts the whole stack",
    ),
    "integration_tests/test_resume.py::"
    "test_run_that_ends_with_controller_raylet_or_head_is_resumed_with_the_same_bits": (
        150.0,
        "a run that is left alone, and one that starts four times",
    ),
    "integration_tests/test_resume.py::"
    "test_run_that_loses_processes_of_four_kinds_and_is_resumed_equals_an_uninterrupted_run": (
        300.0,
        "a run that is left alone, and one whose processes start five times",
    ),
    "integration_tests/test_storage.py::"
    "test_killed_run_with_background_checkpoints_continues_from_s3_with_the_same_bits": (
        120.0,
        "a run that is left alone, and one that starts twice, each with Ray",
    ),
}
"""For the id of a test: limit in seconds, and the reason."""
STILL_S = 10.0
"""Seconds for which a machine may stand still while a shared fixture is set up."""
PROBE_S = 0.2
"""Seconds of `slowdown`'s computation on a quiet machine, the basis of the limits."""
_PROBE_ROUNDS = 9_000_000
_SPENT = pytest.StashKey[float]()
_LATE = pytest.StashKey[str | None]()
"""Message about a test that was late."""
_SHARED = pytest.StashKey[dict[str, float]]()
"""Seconds of the shared fixtures that were set up for a test."""


def slowdown() -> float:
    """Return the time of a test now, divided by its time on a quiet machine; at least 1.

    Speed and load count: the seconds of one thread's computation, and the number of processes waiting for a core, which
    delay the awaited processes of a test.
    """
    start = time.perf_counter()
    total = 0
    for number in range(_PROBE_ROUNDS):
        total += number
    speed = (time.perf_counter() - start) / PROBE_S
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(1.0, speed) * max(1.0, load)


def limit_of(item: pytest.Item) -> float:
    """Return the limit of a test in seconds."""
    if item.nodeid in ALLOWED:
        return ALLOWED[item.nodeid][0]
    return max(limit for tier, limit in LIMITS_S.items() if tier == "unit" or item.get_closest_marker(tier))


def excess(subject: str, seconds: float, limit: float) -> str | None:
    """Return a message if a test or a fixture took longer than its limit, else None."""
    limit *= MARGIN
    if seconds <= limit:
        return None
    slower = slowdown()
    if seconds <= limit * slower:
        return None
    return (
        f"{subject} took {seconds:.1f} s, its limit is {limit:g} s (the machine is {slower:.1f} times as slow or "
        "busy as the one that limits are made for): make the test faster, or give a reason in ALLOWED of "
        "rl_plugins/tests/time_limits.py"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Scale the timeout of the command line, or else of the configuration; 0 is no timeout."""
    timeout = config.option.timeout
    if timeout is None:
        timeout = os.environ.get("PYTEST_TIMEOUT") or config.getini("timeout")
    if timeout:
        config.option.timeout = patient(float(timeout))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Measure the set-up of a fixture that several tests share."""
    if fixturedef.scope == "function":
        return (yield)
    shared = request.config.stash.setdefault(_SHARED, {})
    start, others = time.perf_counter(), sum(shared.values())
    try:
        return (yield)
    finally:
        # A fixture can ask for other shared fixtures during its own set-up.
        seconds = time.perf_counter() - start - (sum(shared.values()) - others)
        shared[f"{fixturedef.baseid}::{fixturedef.argname}"] = seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Measure a test, and let its teardown fail if a shared fixture was late."""
    report = yield
    item.stash[_SPENT] = item.stash.get(_SPENT, 0.0) + call.duration
    if call.when == "teardown":
        shared, item.config.stash[_SHARED] = item.config.stash.get(_SHARED, {}), {}
        own = item.stash[_SPENT] - sum(shared.values())
        item.stash[_LATE] = excess(item.nodeid, own, limit_of(item))
        found = [excess(f"the fixture {name}", seconds, limit_of(item) + STILL_S) for name, seconds in shared.items()]
        if report.passed and any(found):
            _fail(report, "\n".join(filter(None, found)))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and a late test once more; let the teardown of a test that is late twice fail."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    late = item.stash.get(_LATE, None)
    if late and all(report.passed for report in reports):
        again = _run_again(item, nextitem)
        if failed := [report.longreprtext for report in again if report.failed]:
            # The time of a failure says nothing about the time of the test.
            _fail(reports[-1], "\n".join([late, "The test ran once more, and failed:", *failed]))
        elif item.stash.get(_LATE, None):
            _fail(reports[-1], late)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _fail(report: pytest.TestReport, message: str) -> None:
    report.outcome, report.longrepr = "failed", message


def _run_again(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    item.stash[_SPENT], item.stash[_LATE] = 0.0, None
    if isinstance(item, pytest.Function):
        # pytest has no public function that lets a test ask for its fixtures again.
        item._initrequest()
    _start_timeout_again(item)
    return runtestprotocol(item, nextitem=nextitem, log=False)


def _start_timeout_again(item: pytest.Item) -> None:
    # The plugin starts one timer for both runs.
    plugin: Any = item.config.pluginmanager.get_plugin("timeout")
    assert plugin is not None, "pytest-timeout is not installed"
    settings = plugin._get_item_settings(item)
    if settings.timeout and not settings.func_only:
        item.ihook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
