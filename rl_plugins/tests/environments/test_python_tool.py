"""The tool that runs programs of the policy."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from rl_plugins.environments.python_tool import RunPython
from rl_plugins.environments.tools import ToolEnvironment
from rl_plugins.sandbox import sandbox
from rl_plugins.sandbox.records import SandboxJob, SandboxResult
from rl_plugins.tests.sandbox.machine import skip_without_namespaces


def test_run_python_returns_output_errors_and_limits() -> None:
    skip_without_namespaces()
    run_python = RunPython("namespaces", limits={"wall_s": 60, "cpu_s": 0.5})
    assert run_python("print(6 * 7)") == "42"
    assert run_python("x = 1") == "[no output]"
    assert run_python("print(1)\nraise SystemExit(3)") == "1\n[exit status 3]"
    assert "ZeroDivisionError" in run_python("1 / 0")
    assert run_python("print(1, flush=True)\nwhile True: pass") == "1\n[ended by the limit: cpu]"


def test_run_python_gives_each_program_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run_python, walls, times = RunPython("none"), list[float](), iter([0.0, 3.0])

    def run(job: SandboxJob) -> SandboxResult:
        walls.append(job.limits.wall_s)
        return SandboxResult("", "", 0, "", 0.1)

    monkeypatch.setattr(run_python._sandbox._backend, "run", run)
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: next(times)))
    run_python("1")
    assert walls == [8.0] and run_python.calls_at_once == len(os.sched_getaffinity(0))


def test_tool_environment_offers_run_python() -> None:
    tools = ToolEnvironment(
        [{"_target_": "rl_plugins.environments.python_tool.RunPython", "sandbox": "none"}], parser=lambda text: []
    )
    (schema,) = tools.schemas
    assert schema["function"]["name"] == "run_python"
    assert list(schema["function"]["parameters"]["properties"]) == ["code"]
    tools.close()
