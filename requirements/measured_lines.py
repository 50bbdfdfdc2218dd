"""Measures the lines that a process runs, for requirements/coverage.sh, which installs this module.

A process that is killed cannot save at its end, so that every process saves every few seconds. A forked process and one
that ends by `os._exit`, as those of multiprocessing do, are measured, too.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

import coverage

SAVE_EVERY_S = 3.0
_measured: coverage.Coverage | None = None


def start() -> None:
    """Measure this process from now on."""
    global _measured
    if _measured is not None:
        _measured.stop()
    measured = coverage.Coverage(config_file=os.environ["MEASURED_LINES"], data_suffix=True)
    measured.start()
    _measured = measured

    def save() -> None:
        while _measured is measured:
            time.sleep(SAVE_EVERY_S)
            measured.save()

    threading.Thread(target=save, daemon=True, name="measured lines").start()


def stop() -> None:
    """Save the lines that ran."""
    global _measured
    if _measured is not None:
        _measured.stop()
        _measured.save()
        _measured = None


_exit = os._exit


def _save_and_exit(status: int) -> None:
    stop()
    _exit(status)


start()
atexit.register(stop)
os.register_at_fork(after_in_child=start)
os._exit = _save_and_exit  # type: ignore[assignment]
