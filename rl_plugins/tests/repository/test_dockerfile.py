"""The Dockerfile installs the lock for GPUs, runs as a user without rights, and copies only existing files."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from rl_plugins.commands.main import COMMANDS

INSTRUCTIONS = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "ARG", "USER", "HEALTHCHECK", "CMD"}


@pytest.fixture
def text(root: Path) -> str:
    return (root / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture
def instructions(text: str) -> list[tuple[str, str]]:
    """Name and arguments of each instruction, in order."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    split = [line.partition(" ") for line in lines.splitlines() if line.strip()]
    return [(name, " ".join(arguments.split())) for name, _, arguments in split]


def arguments_of(instructions: list[tuple[str, str]], name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions if instruction == name]


def test_dockerfile_has_known_instructions_and_begins_with_a_python_of_the_project(root, instructions):
    assert {name for name, _ in instructions} <= INSTRUCTIONS
    name, image = instructions[0]
    version = re.fullmatch(r"python:(3\.\d+)-slim-\w+", image)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert name == "FROM" and version and SpecifierSet(project["requires-python"]).contains(version[1])


def test_dockerfile_installs_the_lock_for_gpus_and_nothing_else(instructions):
    installs = [
        part for run in arguments_of(instructions, "RUN") for part in run.split(" && ") if "pip install" in part
    ]
    lock = "requirements/cuda.lock.txt"
    assert installs == [
        f"grep '^pip==' {lock} | pip install --require-hashes --requirement /dev/stdin",
        f"pip install --no-deps --require-hashes --build-constraint {lock} --requirement {lock}",
        "pip install --no-deps --no-build-isolation .",
    ]


def test_dockerfile_ends_as_a_user_without_rights(instructions):
    names = [name for name, _ in instructions]
    (user,) = arguments_of(instructions, "USER")
    assert any(re.search(rf"useradd .*\b{user}$", run) for run in arguments_of(instructions, "RUN"))
    assert "RUN" not in names[names.index("USER") :] and "COPY" not in names[names.index("USER") :]


def test_dockerfile_checks_health_with_doctor(instructions):
    (health,), (command,) = arguments_of(instructions, "HEALTHCHECK"), arguments_of(instructions, "CMD")
    assert json.loads(health.partition(" CMD ")[2]) == json.loads(command) == ["rl-plugins", "doctor"]
    assert "doctor" in COMMANDS


def test_dockerfile_says_how_to_run_and_asks_the_machine_for_nvidia_smi(text, instructions):
    assert "docker run --rm --gpus all --shm-size=16g" in text
    variables = dict(word.split("=") for line in arguments_of(instructions, "ENV") for word in line.split())
    assert variables["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_dockerignore_leaves_the_files_that_the_wheel_needs(root, instructions):
    lines = [line for line in (root / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    assert lines[0] == "*"
    kept = [line[1:] for line in lines if line[0] == "!"]
    assert [name for name in kept if not (root / name).exists()] == []
    copied = [arguments.split()[0] for arguments in arguments_of(instructions, "COPY")]
    assert all(name == "." or name in kept for name in copied)
    needed = {"pyproject.toml", "README.md", "LICENSE", "rl_plugins", "strategies", "callbacks", "recipes"}
    assert needed <= set(kept) and not any(fnmatch.fnmatch("rl_plugins/config", line) for line in lines[1:])
