"""A long run with checkpoints, validation, conversations and a schedule ahead: what grows from step to step?

`python -m benchmarks.soak [--steps 2000] [--out benchmarks/results/soak.md] [--set key=value ...]` trains a tiny
policy, and measures all processes of the run every few seconds: their number, memory (PSS), open descriptors and shared
memory; and the temporary files and the time of a step. The table has the slope of each figure per 100 steps. The first
fifth of the steps is left out, because caches fill there.

A tool that hangs, raises, returns 10 MB or no text, and ends its process, with a tiny policy made with `tools=True`:

    python -m benchmarks.soak --steps 500 --set model.path=tiny environment=tools environment.deadline_s=1 \\
        'environment.tools=[rl_plugins.tests.environments.sample_tools.obey]' \\
        environment.parser=rl_plugins.tests.environments.sample_tools.read_any_act sampling.max_tokens=96 \\
        data.max_prompt_tokens=32 launcher=local rollout.engine=transformers schedule.max_staleness=0 sampling.stop=[]
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import linear_regression

import psutil

from benchmarks.runs import started
from benchmarks.watch_thread import WatchThread
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import metric_rows

KINDS = {
    "RayTrainWorker": "training worker",
    "VLLMActor": "rollout engine",
    "LoadedRewards": "environment worker",
    "environments.tool_process": "process of the tools",
    "TrainController": "controller",
    "gcs_server": "Ray's GCS",
    "raylet/raylet": "raylet",
    "dashboard/dashboard.py": "Ray's dashboard",
    "dashboard/agent.py": "Ray's agent",
    "mlflow": "sender of metrics",
    "rl_plugins.recipes": "driver",
}
"""Kinds of processes, by a part of their command line."""
MEMORY, DESCRIPTORS, SHARED, PROCESSES = "memory, MB", "descriptors", "shared memory, MB", "processes"
FILES, STEP = "temporary files", "step, s"
WARM_UP = 0.2
"""Share of the steps at the start that is left out."""
_MB = 2**20

Points = list[tuple[float, float]]
"""Steps so far, and a value."""


class SoakWatch(WatchThread):
    """Measures a run every few seconds.

    Args:
        pid: process of the driver.
        metrics: metrics of the run, which give the step.
        temporary: folder of the run's temporary files.
        every_s: seconds between two measurements.
    """

    def __init__(self, pid: int, metrics: Path, temporary: Path, every_s: float) -> None:
        super().__init__(every_s)
        self._root, self._metrics, self._temporary = psutil.Process(pid), metrics, temporary
        self.seen: dict[tuple[str, str], Points] = defaultdict(list)

    def measure(self) -> None:
        """Measure once, if a step has ended."""
        steps = [row["step"] for row in trained(self._metrics)]
        with suppress(psutil.NoSuchProcess):
            if steps:
                self._measure(steps[-1])

    def _measure(self, step: float) -> None:
        largest: dict[tuple[str, str], float] = defaultdict(float)
        processes = [self._root, *self._root.children(recursive=True)]
        for process in processes:
            with suppress(psutil.Error, OSError):
                title = " ".join(process.cmdline())
                kind = next((kind for part, kind in KINDS.items() if part in title), "other processes")
                memory = process.memory_full_info()
                for figure, value in (
                    (MEMORY, memory.pss / _MB),
                    (DESCRIPTORS, process.num_fds()),
                    (SHARED, _shared_bytes(process.pid) / _MB),
                ):
                    largest[kind, figure] = max(largest[kind, figure], value)
        # Ended processes that nobody has waited for count, too.
        largest["all", PROCESSES] = len(processes)
        largest["all", FILES] = sum(len(files) for _, _, files in os.walk(self._temporary))
        for key, value in largest.items():
            self.seen[key].append((step, value))


def _shared_bytes(pid: int) -> int:
    """Return the shared memory of a process, without the pages of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem"))


def trained(metrics: Path) -> list[dict[str, float]]:
    """Return the metrics of the training steps so far."""
    return [row for row in metric_rows(metrics) if "train/loss" in row] if metrics.is_file() else []


def slope(points: Points, steps: int) -> float:
    """Return the change of a value per 100 steps after the warm-up: 0 for fewer than two different steps.

    Args:
        points: steps and values.
        steps: steps of the whole run.
    """
    late = [point for point in points if point[0] > WARM_UP * steps]
    if len({step for step, _ in late}) < 2:
        return 0.0
    return 100 * linear_regression([step for step, _ in late], [value for _, value in late]).slope


def table(seen: dict[tuple[str, str], Points], steps: int) -> str:
    """Return a Markdown table with a line for each figure of each kind of process."""
    lines = ["| of | figure | first | last | per 100 steps |", "|---|---|---|---|---|"]
    for (kind, figure), points in sorted(seen.items()):
        first, last = points[0][1], points[-1][1]
        lines.append(f"| {kind} | {figure} | {first:.4g} | {last:.4g} | {slope(points, steps):+.3g} |")
    return "\n".join(lines)


def run(folder: Path, steps: int, overrides: Sequence[str], every_s: float) -> dict[tuple[str, str], Points]:
    """Train in a folder, and return the values of each kind of process and figure.

    Raises:
        RuntimeError: the run failed. The message ends with its output.
    """
    write_splits(addition_rows(below=100, num_train=4096, num_test=64, seed=0), folder / "data")
    save_tiny_policy(folder / "policy")
    (folder / "tmp").mkdir()
    command = [
        sys.executable, "-m", "rl_plugins.recipes.grpo", "run.name=soak", f"run.output_dir={folder}/outputs",
        f"model.path={folder}/policy", f"data.train_files=[{folder}/data/train.parquet]",
        f"data.val_files=[{folder}/data/test.parquet]", f"run.steps={steps}", "run.checkpoint_every=20",
        "run.eval_every=50", "run.epochs=null", "batch.prompts_per_step=8", "batch.samples_per_prompt=4",
        "data.max_prompt_tokens=8", "sampling.max_tokens=28", "environment.max_turns=3", "schedule.max_staleness=1",
        "sampling.stop=[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z]", "placement.device=cpu",
        "reward.functions.default._target_=integration_tests.rewards.asks_back", *overrides,
    ]  # fmt: skip
    # Ray's sockets are in the folder of temporary files, and paths of sockets must be short.
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    metrics = folder / "outputs" / "soak" / "metrics.jsonl"
    with (folder / "soak.log").open("w+") as log:
        with (
            started(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process,
            SoakWatch(process.pid, metrics, folder / "tmp", every_s) as watch,
        ):
            status = process.wait()
        if status:
            log.seek(0)
            raise RuntimeError(f"the recipe ended with status {status}:\n{log.read()[-4000:]}")
    watch.seen["all", STEP] = [(row["step"], row["time/step"]) for row in trained(metrics)]
    return watch.seen


def main(arguments: list[str] | None = None) -> int:
    """Run the soak test, and print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000, help="training steps (default: %(default)s)")
    parser.add_argument("--every", type=float, default=5, help="seconds between measurements (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="page to write")
    parser.add_argument("--set", nargs="*", default=[], help="options of the recipe")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        seen = run(Path(folder), options.steps, options.set, options.every)
    command = f"make soak STEPS={options.steps}"
    further = [] if options.every == parser.get_default("every") else ["--every", f"{options.every:g}"]
    further += ["--set", *options.set] if options.set else []
    if further:
        command = shlex.join(["python", "-m", "benchmarks.soak", "--steps", str(options.steps), *further])
    page = f"# {options.steps} steps\n\n`{command}`\n\n{table(seen, options.steps)}\n"
    print(page)
    if options.out is not None:
        options.out.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
