"""Configuration errors must show within a second: the package's root must not load libraries with long imports."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"deepspeed", "lightning", "mlflow", "ray", "torch", "transformers", "vllm"}


MODULES = ("rl_plugins", "rl_plugins.errors", "rl_plugins.launch.build_lock")


def test_import_of_light_modules_loads_no_heavy_library(root):
    code = f"import sys, {', '.join(MODULES)}; print(*sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    loaded = set(outcome.stdout.split())
    assert set(MODULES) <= loaded
    assert loaded & HEAVY == set()
