"""Makefile: the environment may lie in any folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rl_plugins.tests.loops import for_each

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("venv", ["/somewhere/env", ".venv"])
def test_makefile_takes_an_absolute_or_a_relative_folder_of_the_environment(venv: str) -> None:
    show = "show: ; @echo $(TORCH_EXTENSIONS_DIR) $(firstword $(subst :, ,$(PATH)))"
    command = ["make", "--silent", "--eval", show, "show", f"VENV={venv}"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    folder = ROOT / venv
    assert shown == [str(folder / "torch_extensions"), str(folder / "bin")]


@pytest.mark.parametrize(("target", "margin"), [("test", "3"), ("test-all", "1")])
def test_limits_of_tests_have_a_margin_in_make_test_alone(target: str, margin: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\n{target}: export TEST_TIME_MARGIN = {margin}\n" in makefile


@for_each("target", ["unit", "integration", "extended", "core", "all-tiers", "campaign", "soak", "gpu"])
def test_all_targets_with_tests_but_gpu_hide_the_gpus_of_the_machine(target: str, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text("#!/bin/sh\necho value=${CUDA_VISIBLE_DEVICES-none}\n")
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    command = ["make", "--silent", target, f"VENV={tmp_path}"]
    shown = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert set(shown.stdout.split()) == {"value=none" if target == "gpu" else "value="}


def test_gpu_runs_in_the_environment_in_use(tmp_path: Path) -> None:
    for name in ("used", "made"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo /{name} || echo {name} $TORCH_EXTENSIONS_DIR\n')
        python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/used/bin:{os.environ['PATH']}"}
    command = ["make", "--silent", "gpu", f"VENV={tmp_path}/made"]
    shown = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert set(shown.stdout.splitlines()) == {"used /used/torch_extensions"}


@pytest.mark.parametrize(("status", "printed"), [(0, ""), (1, ""), (2, "one process\n")])
def test_typecheck_runs_mypy_in_one_process_if_a_worker_does_not_start(
    status: int, printed: str, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\n[ "$3" = --num-workers ] && exit {status}\necho one process\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    command = ["make", "--silent", "typecheck", f"VENV={tmp_path}"]
    outcome = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (outcome.returncode == 0, outcome.stdout) == (status != 1, printed)


def test_docs_install_a_missing_environment_first(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    command = ["make", "--dry-run", "docs", f"VENV={missing}"]
    outcome = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    lines = outcome.stdout.splitlines()
    announced = next(number for number, line in enumerate(lines) if f"Installing into {missing}" in line)
    built = next(number for number, line in enumerate(lines) if "mkdocs build" in line)
    assert announced < built and not missing.exists()
