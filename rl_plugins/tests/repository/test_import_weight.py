"""Configuration errors must show within a second, so the package's root must not load what takes ten."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"deepspeed", "lightning", "mlflow", "ray", "torch", "transformers", "vllm"}


@pytest.mark.parametrize("module", ["rl_plugins", "rl_plugins.errors", "rl_plugins.launch.build_lock"])
def test_import_loads_no_heavy_library(root, module):
    code = f"import sys, {module}; print(*sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    loaded = set(outcome.stdout.split())
    assert module in loaded
    assert loaded & HEAVY == set()
