"""Projects of Lightning in examples/ without and with RL: few added lines, after which the reward rises."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.command_server import run_command
from integration_tests.projects import added_lines, logged
from rl_plugins.tests.repository.documentation import ROOT, WRITTEN, blocks

EXAMPLES = ROOT / "examples"
MOST_ADDED_LINES = {"sums_from_scratch": 15, "lightning_cli": 14}
PROJECTS = sorted(MOST_ADDED_LINES)
PROGRAMS = {"python": [sys.executable], "rl-plugins": [sys.executable, "-m", "rl_plugins"]}
LEAST_RISE = 0.3
OF_DEEPSPEED = "real_accelerator.py"
"""Part of a line of DeepSpeed, which `save_pretrained` of transformers imports: there is no GPU."""


def files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.suffix in (".py", ".yaml")}


def commands(project: str) -> Iterator[list[str]]:
    """Yield the words of each command in the README of a project."""
    for block in blocks(WRITTEN[f"examples/{project}/README.md"], "bash"):
        yield from map(shlex.split, block.replace("\\\n", " ").splitlines())


def warnings_in(output: str) -> list[str]:
    """Return the lines of warnings and errors, without the line of DeepSpeed."""
    found = [line for line in output.splitlines() if re.search("warning|error|traceback", line, re.IGNORECASE)]
    return [line for line in found if OF_DEEPSPEED not in line]


@pytest.mark.parametrize("project", PROJECTS)
def test_project_with_rl_adds_few_lines(project: str) -> None:
    before, after = files(EXAMPLES / project / "before"), files(EXAMPLES / project / "after")
    assert before.keys() == after.keys()
    added = [line for name in before for line in added_lines(before[name], after[name])]
    assert 0 < len(added) <= MOST_ADDED_LINES[project] <= 15
    assert not any("rl_plugins" in path.read_text() for path in before.values())


@pytest.mark.extended
@pytest.mark.parametrize("project", PROJECTS)
def test_project_with_rl_raises_the_reward_of_validation(project: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    for program, *arguments in commands(project):
        result = run_command([*PROGRAMS[program], *arguments], cwd=tmp_path, env=environment, check=True)
        assert warnings_in(result.stdout + result.stderr) == []
    before, after = (logged(tmp_path / "logs" / name / "version_0" / "metrics.csv") for name in ("sft", "rl"))
    assert before["train_loss"][-1] < before["train_loss"][0]
    # The first validation is Lightning's check before training.
    first, last = after["val/reward"][0], after["val/reward"][-1]
    assert first > 0 and last >= first + LEAST_RISE
