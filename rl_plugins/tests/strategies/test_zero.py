"""ZeRO in one process over gloo: named engines, weights, and checkpoints that restore bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_plugins.tests.strategies import zero_worker


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_engines_weights_and_checkpoints(tmp_path: Path, stage: int) -> None:
    # DeepSpeed chooses its accelerator once per process, and its process group outlives the trainer.
    root = str(Path(__file__).parents[3])
    result = subprocess.run(
        [sys.executable, zero_worker.__file__, str(stage), str(tmp_path)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": root},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("the checks are through\n")
