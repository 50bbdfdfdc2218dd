"""Seconds of an update of the policy on one GPU by strategy, without Ray and vLLM, and where the seconds go.

`python -m benchmarks.gpu.update [--sizes 0.5b] [--strategies zero3 fsdp] [--prompts 8] [--profile FOLDER]` trains a
policy of random weights with GRPO on random responses, which an engine makes at once, in a process for each strategy.
A row has the median seconds of `update_policy`, the same divided by the number of micro-batches, tokens per second of
the update, MFU, the peak memory of the GPU, and the share of a further update in which the GPU was busy. With
`--profile`, two more updates, of at most 4 prompts each, write tables: operators by their time on the CPU and on the
GPU, and Python functions.
`--device cpu` tries the program with a tiny policy. The exit status is 1 if a strategy failed, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.step import POLICIES, fault_of
from integration_tests.gpu.without_vllm.program import run_process
from rl_plugins.launch.gpus import read_machine

STRATEGIES = ("single_device", "zero1", "zero2", "zero3", "fsdp")
DEFAULTS = {
    "cuda": {"prompts": 8, "samples": 8, "new_tokens": 512, "micro_batch": 9216},
    "cpu": {"prompts": 4, "samples": 2, "new_tokens": 16, "micro_batch": 240},
}
"""Sizes of a step for each device: `micro_batch` is in tokens."""
TASK, PROGRESS, ERROR, RESULT = "task.json", "progress", "error", "result.json"
"""Files of a process."""
PROCESS = (sys.executable, "-u", "-m", "benchmarks.gpu.update_process")
_COLUMNS = ("update s", "micro-batches", "s of one", "tokens/s", "MFU", "peak GiB", "GPU busy")


@dataclass(frozen=True)
class Task:
    """Work of a process.

    Attributes:
        strategy: name in `STRATEGIES`.
        policy: folder of the policy.
        device: `cuda` or `cpu`.
        prompts: prompts of a step.
        samples: responses to each prompt.
        new_tokens: tokens of each response.
        micro_batch: largest number of tokens of a micro-batch.
        steps: measured steps; medians leave out the first.
        tables: start of the names of the tables' files; None for no tables.
    """

    strategy: str
    policy: str
    device: str
    prompts: int
    samples: int
    new_tokens: int
    micro_batch: int
    steps: int
    tables: str | None = None


@dataclass(frozen=True)
class Measured:
    """Figures of a strategy.

    Attributes:
        seconds: median seconds of `update_policy`.
        micro_batches: micro-batches of an update.
        tokens_per_s: trained tokens per second of `update_policy`; a shared prompt counts once.
        mfu: model FLOPs utilization of `update_policy`; NaN for a device without a known peak.
        peak_gib: peak memory of the device in an update in GiB; on CPU, the memory of the process.
        busy: share of an update in which the GPU ran a kernel, a copy or a fill; NaN on CPU.
    """

    seconds: float
    micro_batches: int
    tokens_per_s: float
    mfu: float
    peak_gib: float
    busy: float


def run_task(task: Task, folder: Path, deadline_s: float) -> Measured | str:
    """Do a task in a process of its own; return its figures, or the reason why there are none.

    Args:
        task: the task.
        folder: empty folder for files of the process.
        deadline_s: longest duration of the process in seconds.
    """
    (folder / TASK).write_text(json.dumps(asdict(task)))
    log = Path(f"{task.tables}_output.txt") if task.tables else folder / "output.txt"
    environment = {
        **os.environ,
        # A group of one rank. With port 0, the store of the group takes a free port.
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
        "NODE_RANK": "0",
        # DeepSpeed selects its accelerator at its import.
        "DS_ACCELERATOR": task.device,
        # As in a training worker: each warning costs time.
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    }  # fmt: skip
    with log.open("w") as output:
        status = run_process([*PROCESS, str(folder)], output, deadline_s, environment)
    if result := _text(folder / RESULT):
        return Measured(**json.loads(result))
    fault = f"the process ended with status {status}" if status else ""
    if status is None:
        fault = f"no end within {deadline_s:g} s, in {_text(folder / PROGRESS) or 'the imports of libraries'}"
    return _text(folder / ERROR) or fault


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def save_policy(size: str, device: str, folder: Path) -> int:
    """Write the policy of a size, on a CPU a tiny one, and return the number of parameters."""
    # transformers imports DeepSpeed to save a model, and DeepSpeed would print the selected device.
    os.environ.setdefault("DS_ACCELERATOR", device)
    if device == "cuda":
        return POLICIES[size](folder)
    from rl_plugins.models.tiny import build_model, save_tiny_policy

    save_tiny_policy(folder)
    return sum(parameter.numel() for parameter in build_model().parameters())


def head() -> str:
    """Return the names of the columns."""
    return f"  {'':15}" + "".join(f"{name:>15}" for name in _COLUMNS)


def row(strategy: str, found: Measured | str) -> str:
    """Return the row of a strategy."""
    if isinstance(found, str):
        return f"  {strategy:15}  failed: {found}"
    figures = (
        f"{found.seconds:.3f}", f"{found.micro_batches}", f"{found.seconds / found.micro_batches:.4f}",
        f"{found.tokens_per_s:,.0f}", _share(found.mfu), f"{found.peak_gib:.2f}", _share(found.busy),
    )  # fmt: skip
    return f"  {strategy:15}" + "".join(f"{figure:>15}" for figure in figures)


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=POLICIES, default=["0.5b"])
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=["single_device", "zero1", "zero3", "fsdp"]
    )
    parser.add_argument("--prompts", type=int, help="prompts of a step")
    parser.add_argument("--samples", type=int, help="responses to each prompt")
    parser.add_argument("--new-tokens", type=int, help="tokens of each response")
    parser.add_argument("--micro-batch", type=int, help="largest number of tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="measured steps; medians leave out the first")
    parser.add_argument("--device", choices=DEFAULTS, default="cuda", help="cpu tries the program with a tiny policy")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="folder for tables and outputs of processes")
    parser.add_argument("--deadline", type=float, default=180.0, help="longest duration of a strategy in seconds")
    return parser.parse_args()


def main() -> int:
    """Run and print; return the exit status."""
    arguments = _arguments()
    device, profile = arguments.device, arguments.profile
    machine = read_machine()
    if device == "cuda":
        if fault := fault_of(machine, "--device cpu tries the program without"):
            print(fault)
            return 2
        print(f"{machine.visible[0].name}, driver {machine.visible[0].driver}, torch {machine.torch}")
    given = {name: getattr(arguments, name) for name in DEFAULTS[device] if getattr(arguments, name) is not None}
    sizes = {**DEFAULTS[device], **given}
    if profile:
        profile.mkdir(parents=True, exist_ok=True)
    failed = False
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            parameters = save_policy(size, device, folder / "policy")
            print(
                f"{size if device == 'cuda' else 'tiny'}: {parameters / 1e6:.1f} M parameters, {sizes['prompts']} x "
                f"{sizes['samples']} samples, {sizes['new_tokens']} new tokens, micro-batches of up to "
                f"{sizes['micro_batch']} tokens\n{head()}",
                flush=True,
            )
            for strategy in arguments.strategies:
                (folder / strategy).mkdir()
                tables = str(profile.resolve() / f"{size}_{strategy}") if profile else None
                task = Task(strategy, str(folder / "policy"), device, **sizes, steps=arguments.steps, tables=tables)
                found = run_task(task, folder / strategy, arguments.deadline)
                failed |= isinstance(found, str)
                print(row(strategy, found), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
