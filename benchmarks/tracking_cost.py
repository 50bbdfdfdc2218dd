"""Cost of a recipe's tracking: share of a step for metrics, tables, system metrics and traces.

    python -m benchmarks.tracking_cost --step-s 0.5 --traces 0 2

Steps of real work (matrix products on one thread) are logged to an SQLite store, as in a recipe. The benchmark measures
the seconds of tracking in the training thread, and the CPU seconds of the background threads. Without a spare core, the
background threads slow training, too.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time

import psutil
import torch

from rl_plugins.callbacks.samples import SampleTrace
from rl_plugins.callbacks.system_metrics import Sampler
from rl_plugins.run_folder import RunFolder
from rl_plugins.tracking.loggers import JsonLinesLogger, MLflowTracking

METRICS = 60
TABLE_EVERY, TABLE_ROWS = 10, 32
ROW = {"prompt": "How many? " * 20, "response": "So many. " * 60, "score": 1.0, "ground_truth": "42", "failure": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds of a step")
    parser.add_argument("--traces", type=int, nargs="+", default=[0], help="of each step; one measurement for each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.steps} steps of {options.step_s:g} s, {METRICS} metrics, {TABLE_ROWS} rows every {TABLE_EVERY}")
    for traces in options.traces:
        training_s, behind_s = measure(options.steps, options.step_s, traces)
        total = (training_s + behind_s) / options.step_s
        print(
            f"traces={traces}: training thread {1e3 * training_s:.2f} ms, threads behind it {1e3 * behind_s:.2f} ms "
            f"of CPU: {total:.2%} of a step"
        )


def measure(steps: int, step_s: float, traces: int) -> tuple[float, float]:
    """Return the seconds of a step in the training thread and the CPU seconds of other threads, without the start."""
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(path)
        tracking = MLflowTracking(uri=f"sqlite:///{path}/mlflow.db", experiment="cost", folder=folder)
        file, sampler = JsonLinesLogger(folder.metrics), Sampler("system/node_0/", every_s=5.0)
        sampler.start()
        training_s, before = 0.0, 0.0
        for step in range(-steps // 4, steps):
            if step == 0:
                # From here on: no imports, no creation of the store's tables, no first connection.
                training_s, before = 0.0, cpu_of_others()
            work(step_s)
            started = time.perf_counter()
            for values in ({f"train/{n}": float(n) for n in range(METRICS)}, sampler.take()):
                file.log_metrics(values, step + steps)
                tracking.log_metrics(values, step + steps)
            if step % TABLE_EVERY == 0:
                tracking.log_table({key: [value] * TABLE_ROWS for key, value in ROW.items()}, f"samples/{step}.json")
            for _ in range(traces):
                tracking.submit(SampleTrace(step, ROW))
            training_s += time.perf_counter() - started
        behind_s = cpu_of_others() - before
        sampler.ended.set()
        tracking.finalize("success")
    return training_s / steps, behind_s / steps


def work(seconds: float) -> None:
    matrix = torch.ones(256, 256)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix = torch.tanh(matrix @ matrix)


def cpu_of_others() -> float:
    """Return the CPU seconds of this process outside the calling thread."""
    own = threading.get_native_id()
    return sum(one.user_time + one.system_time for one in psutil.Process().threads() if one.id != own)


if __name__ == "__main__":
    main()
