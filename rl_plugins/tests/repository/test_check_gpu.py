"""`make gpu` ends in one line where the tests cannot run on a GPU."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

from rl_plugins.launch import gpus
from rl_plugins.tests.launch import nvidia_smi as recorded
from rl_plugins.tests.launch.nvidia_smi import H100


@pytest.fixture
def message(monkeypatch: pytest.MonkeyPatch, root: Path):
    """Function to run requirements/check_gpu.py for a build of torch; the function returns the last message."""
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr(gpus, "driver_cuda", lambda: (13, 0))

    def run(torch: str, cuda: tuple[int, int] | None) -> object:
        monkeypatch.setattr(gpus, "_torch_build", lambda: (torch, cuda))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(root / "requirements" / "check_gpu.py"))
        return end.value.code

    return run


def test_check_gpu_refuses_a_build_of_torch_for_cpus(message, monkeypatch):
    recorded.answer(monkeypatch, recorded.query(H100))
    assert message("2.13.0", (13, 0)) == 0
    assert message("2.13.0+cpu", None) == (
        "make gpu: torch 2.13.0+cpu is built for CPUs: install requirements/cuda.lock.txt into a fresh environment "
        "(docs/gpus.md)"
    )


def test_check_gpu_refuses_a_machine_without_a_visible_gpu(message, monkeypatch):
    recorded.fail(monkeypatch, "No devices were found", files=0)
    assert message("2.13.0", (13, 0)) == "make gpu: this machine has no NVIDIA GPU"
    recorded.answer(monkeypatch, recorded.query(H100))
    monkeypatch.setenv(gpus.VISIBLE, "-1")
    assert message("2.13.0", (13, 0)) == "make gpu: CUDA_VISIBLE_DEVICES='-1' hides all GPUs"


def test_make_gpu_checks_before_the_tests(root):
    planned = subprocess.run(
        ["make", "--no-print-directory", "-n", "gpu"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert planned.splitlines() == [
        "python requirements/check_gpu.py",
        "python -m integration_tests.gpu.without_vllm",
        "python -m pytest -m gpu --timeout 1800",
    ]
