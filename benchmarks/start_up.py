"""Times of the parts of a recipe's start, from the command to the first training step.

`python -m benchmarks.start_up` runs one step of GRPO on the quickstart's model with two ZeRO-3 workers and a vLLM
engine, and prints the start time of each part. The measurement uses signs outside of the processes: the recipe's first
line, the titles of Ray's processes, and the first line of the metrics.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.runs import TIMEOUT_S, started

TARGET_S = 60


def main() -> None:
    """Measure and print."""
    from rl_plugins.data.prepare.files import write_splits
    from rl_plugins.data.prepare.tasks import addition_rows
    from rl_plugins.models.tiny import save_tiny_policy

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_policy(folder / "policy")
        write_splits(addition_rows(below=50, num_train=1732, num_test=512, seed=0), folder / "data")
        reached = follow_start(folder)
    before = 0.0
    for what, seconds in sorted(reached.items(), key=lambda item: item[1]):
        print(f"{seconds:6.1f} s  (+{seconds - before:4.1f})  {what}")
        before = seconds
    print(f"target: the first step within {TARGET_S} s")


def follow_start(folder: Path) -> dict[str, float]:
    """Train one step, and return the seconds from the start to each part.

    Raises:
        RuntimeError: the recipe failed, or has not ended after `TIMEOUT_S` seconds. The message ends with its output.
    """
    log = folder / "log"
    command = [
        sys.executable, "-m", "rl_plugins.recipes.grpo", "--config-name", "quickstart_grpo", "run.name=run",
        f"run.output_dir={folder}/outputs", f"model.path={folder}/policy", "run.steps=1",
        f"data.train_files=[{folder}/data/train.parquet]", "run.eval_every=0", "run.export=false",
    ]  # fmt: skip
    start = time.perf_counter()
    reached: dict[str, float] = {}

    def reach(what: str, now: bool) -> None:
        if now:
            reached.setdefault(what, time.perf_counter() - start)

    metrics = folder / "outputs" / "run" / "metrics.jsonl"
    with log.open("w") as output, started(command, stdout=output, stderr=subprocess.STDOUT) as process:
        while process.poll() is None:
            if time.perf_counter() - start > TIMEOUT_S:
                raise RuntimeError(f"the recipe has not ended after {TIMEOUT_S} s:\n{log.read_text()[-4000:]}")
            titles = _titles(psutil.Process(process.pid))
            reach("checked configuration, model, data and reward", "RL steps" in log.read_text())
            reach("Ray is up: the engine's process has begun", any("VLLMActor" in title for title in titles))
            reach("the training workers' processes have begun", any("RayTrainWorker" in title for title in titles))
            loaded = any("VLLMActor" in title and "__init__" not in title for title in titles)
            reach("the engine has loaded", loaded)
            reach("first training step done", metrics.is_file() and "train/loss" in metrics.read_text())
            time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"the recipe ended with status {process.returncode}:\n{log.read_text()[-4000:]}")
    return reached


def _titles(process: psutil.Process) -> list[str]:
    titles = []
    for child in process.children(recursive=True):
        try:
            titles.append(" ".join(child.cmdline()))
        except psutil.Error:
            continue
    return titles


if __name__ == "__main__":
    main()
