"""Threads that need MLflow at the same time all get the whole of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

AT_ONCE = """
import sys, threading
from rl_plugins.callbacks.mlflow_import import import_mlflow

start, failures = threading.Barrier(3), []

def use(names):
    start.wait()
    try:
        import_mlflow()
        for name in names:
            __import__(name)
    except BaseException as error:
        failures.append(error)

names = (["mlflow.exceptions"], ["mlflow.system_metrics.metrics.cpu_monitor"], ["mlflow.tracking", "mlflow.entities"])
threads = [threading.Thread(target=use, args=(of,)) for of in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(repr(failures) if failures else 0)
"""


@pytest.mark.parametrize("attempt", range(2))
def test_three_threads_import_it_at_once(attempt: int) -> None:
    # In a process that has not imported it.
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
