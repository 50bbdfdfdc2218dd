"""An MLflow store: `import_mlflow` in threads gives complete modules; `open_client` makes complete tables."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from rl_plugins.tests.patience import patient
from rl_plugins.tracking.store import import_mlflow, open_client

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
    # In a process without an import of MLflow. Without `import_mlflow` the threads' imports fail every time.
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr


def test_open_client_removes_the_partial_file_of_a_killed_process(tmp_path: Path, sqlite_without_sync: None) -> None:
    import_mlflow()
    partial = tmp_path / "mlflow.db.partial"
    with closing(sqlite3.connect(partial)) as connection:
        # A migration copies a table through a table of this name, and cannot make a second one.
        connection.execute("CREATE TABLE _alembic_tmp_metrics (run_uuid TEXT)")
    journal = tmp_path / "mlflow.db.partial-journal"
    journal.write_bytes(b"pages of the killed process")

    client = open_client(f"sqlite:///{tmp_path}/mlflow.db")

    assert [experiment.name for experiment in client.search_experiments()] == ["Default"]
    assert not partial.exists() and not journal.exists()
