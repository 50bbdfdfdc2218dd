"""Limits of processes with code of the user."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rl_plugins.rewards import limits
from rl_plugins.tests.patience import patient

# The limits hold for the whole process.
UNDER_A_HARD_LIMIT = """
import asyncio, resource
from rl_plugins.environments.tool_functions import Threads
from rl_plugins.rewards.limits import WorkerLimits

WorkerLimits(memory_mb=10**13).limit_memory()
most = 4 * 2**30
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
for mib in (512, 8192):
    WorkerLimits(memory_mb=mib).limit_memory(Threads.stack_bytes)
    limit, hard = resource.getrlimit(resource.RLIMIT_DATA)
    assert hard == most and (limit < most) == (mib < 4096), (mib, limit, hard)
for less in (0, 4096):
    resource.setrlimit(resource.RLIMIT_DATA, (most - less, most))
    assert asyncio.run(Threads().run(lambda: 1)) == 1
"""


def test_limit_memory_and_threads_of_tools_keep_a_hard_limit() -> None:
    subprocess.run([sys.executable, "-c", UNDER_A_HARD_LIMIT], check=True, timeout=patient(60))


def test_limit_beyond_the_numbers_of_the_kernel_is_the_largest_number() -> None:
    assert limits.at_most(10**13 * 2**20, resource.RLIM_INFINITY) == 2**63 - 1
    assert limits.at_most(10**13 * 2**20, 5) == 5 and limits.at_most(7, resource.RLIM_INFINITY) == 7


def test_free_memory_of_a_container_includes_pages_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**20 - 4096}\n")
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    assert limits._free_bytes() == 4096
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 9000\ninactive_file 8192\n")
    assert limits._free_bytes() == 4096 + 8192
    (tmp_path / "memory.max").write_text("max\n")
    assert limits._free_bytes() > 2**20
