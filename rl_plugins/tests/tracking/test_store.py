"""`import_mlflow` in threads: every thread gets complete modules."""

from __future__ import annotations

import subprocess
import sys

from rl_plugins.tests.patience import patient

AT_ONCE = """
import sys, threading
from rl_plugins.tracking.store import import_mlflow

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


def test_import_mlflow_by_three_threads_at_once() -> None:
    # In a process that has not imported MLflow. Without `import_mlflow` the threads' imports fail every time.
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr
