"""Seconds of an RL step by phase on the GPUs of this machine, MFU, rate of weight updates, and the same work by TRL.

`python -m benchmarks.gpu.step [--sizes 0.5b] [--gpus 8] [--steps 8] [--set strategy.name=fsdp]` trains a policy of
random weights twice, with a colocated engine on each GPU. In the first run, the trainer's memory is on the host while
the engines sample, if a GPU has no room for both. In the second run (`stay`), nothing moves, so the seconds before and
after sampling are the seconds in which the engines wake up and go to sleep. If trl is installed, its trainer with
colocated vLLM does the same work, and is compared with the second run: its engines sleep, too, and nothing else moves.
The exit status is 2 without a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.grpo_step import run_alternative
from benchmarks.policies import PROMPT_TOKENS, save_500m, save_1500m, save_prompts
from benchmarks.runs import MeasuredRun, run_grpo
from rl_plugins.launch.gpu_checks import faults_of_software
from rl_plugins.launch.gpus import GpuMachine, read_machine

POLICIES = {"0.5b": save_500m, "1.5b": save_1500m}
PLACES = ("while_sampling", "stay")
PROMPTS_OF_GPU, SAMPLES, NEW_TOKENS, MICRO_BATCH = 64, 8, 512, 16
_BYTES_OF_WEIGHT = 2
_COPY_BYTES = 2**30


@dataclass(frozen=True)
class Measured:
    """Results of a size.

    Attributes:
        title: line about the work.
        runs: run of each place of `PLACES`.
        weight_bytes: bytes of an update.
        copy_rate: bytes per second of a copy in the memory of a GPU.
        trl: samples per second of TRL, or the reason why there is no number.
    """

    title: str
    runs: Mapping[str, MeasuredRun]
    weight_bytes: int
    copy_rate: float
    trl: float | str


def measure(size: str, gpus: int, steps: int, overrides: list[str]) -> Measured:
    """Run the recipe for each place, and TRL."""
    prompts = PROMPTS_OF_GPU * gpus
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = POLICIES[size](folder / "policy")
        save_prompts(folder / "data", rows=2 * prompts)
        options = [
            f"run.steps={steps}",
            "placement.device=cuda",
            f"placement.num_workers={gpus}",
            "model.precision=bf16-mixed",
            f"batch.prompts_per_step={prompts}",
            f"batch.samples_per_prompt={SAMPLES}",
            f"batch.tokens_per_micro_batch={MICRO_BATCH * (PROMPT_TOKENS + NEW_TOKENS)}",
            f"sampling.max_tokens={NEW_TOKENS}",
            f"data.max_prompt_tokens={PROMPT_TOKENS}",
            *overrides,
        ]
        runs = {}
        for place in PLACES:
            runs[place] = run_grpo(folder, *options, f"strategy.offload.policy={place}", name=place)
            print(f"{size} {place}: {runs[place].median('time/step'):.2f} s a step", flush=True)
        trl = run_trl(folder, gpus, prompts, steps) if find_spec("trl") else "trl is not installed"
    title = f"{size}: {parameters / 1e6:.0f} M parameters, {prompts} x {SAMPLES} samples, {NEW_TOKENS} new tokens"
    return Measured(title, runs, _BYTES_OF_WEIGHT * parameters, copy_rate(), trl)


def run_trl(folder: Path, gpus: int, prompts: int, steps: int) -> float | str:
    """Return the samples per second of TRL's trainer with a process and a colocated engine on each GPU, or its error.

    TRL supports few versions of vLLM, often older ones.
    """
    work = [
        "--num_processes", str(gpus), "--mixed_precision", "bf16", "-m", "benchmarks.trl_loop",
        f"{folder}/policy", f"{folder}/data/train.parquet",
        "--prompts", str(prompts), "--samples", str(SAMPLES), "--max-tokens", str(NEW_TOKENS),
        "--micro-batch", str(MICRO_BATCH), "--steps", str(steps), "--bf16", "--vllm",
    ]  # fmt: skip
    try:
        return float(run_alternative(["accelerate.commands.launch"], work)["samples_per_s"])
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"TRL failed: {str(error).strip().splitlines()[-1]}"


def copy_rate() -> float:
    """Return the bytes per second of a copy in the memory of the first GPU: median of 7."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return _COPY_BYTES / median(seconds[1:])


def report(measured: Measured) -> list[str]:
    """Return the lines of the report."""
    runs = measured.runs
    moved, stay = (runs[place].phases() for place in PLACES)
    lines = [measured.title, f"  {'seconds':24}{PLACES[0]:>16}{PLACES[1]:>16}"]
    lines.append(_row("  step", [run.median("time/step") for run in runs.values()], "16.3f"))
    for name in sorted(moved | stay, key=lambda phase: -stay.get(phase, 0.0)):
        lines.append(_row(f"    {name}", [moved.get(name, 0.0), stay.get(name, 0.0)], "16.3f"))
    # A GPU that is not in the table of peaks has no MFU.
    lines.append(_row("  MFU of the update", [mfu(run) for run in runs.values()], "16.1%"))
    wakes, sleeps = stay.get("offload", 0.0), stay.get("reload", 0.0)
    moving = moved.get("offload", 0.0) + moved.get("reload", 0.0) - wakes - sleeps
    lines.append(
        f"  engines wake up in {wakes:.3f} s and go to sleep in {sleeps:.3f} s; "
        f"the trainer's memory moves in {moving:.3f} s"
    )
    update, copy = measured.weight_bytes / runs["stay"].median("time/update_weights"), measured.copy_rate
    lines.append(
        f"  weight update {update / 1e9:.1f} GB/s: {update / copy:.2f} of a copy in the memory of a GPU, "
        f"{copy / 1e9:.0f} GB/s"
    )
    here = runs["stay"].median("samples_per_s")
    if isinstance(measured.trl, str):
        return [*lines, f"  samples/s {here:.1f}; {measured.trl}"]
    times = here / measured.trl
    return [*lines, f"  samples/s {here:.1f}; TRL with colocated vLLM {measured.trl:.1f}: {times:.2f} times its rate"]


def mfu(run: MeasuredRun) -> float:
    """Return the median model FLOPs utilization of the update; NaN without values."""
    return median(run.values("throughput/mfu")[2:] or [float("nan")])


def _row(name: str, values: Sequence[float], form: str) -> str:
    return f"{name:26}" + "".join(f"{value:{form}}" for value in values)


def fault_of(machine: GpuMachine, other_way: str) -> str:
    """Return the fault that stops a benchmark on GPUs, with the way out; empty without a fault.

    Args:
        machine: facts about the machine.
        other_way: clause about a benchmark without a GPU.
    """
    faults = [f"{fault.found}: {fault.fix}" for fault in faults_of_software(machine)]
    if not machine.visible:
        faults.append(f"CUDA shows no GPU: rl-plugins doctor names the cause; {other_way}")
    return faults[-1] if faults else ""


def main() -> int:
    """Run and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=POLICIES, default=["0.5b"])
    parser.add_argument("--gpus", type=int, help="number of GPUs; default: all visible GPUs")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run; medians leave out the first two")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the recipe")
    arguments = parser.parse_args()
    machine = read_machine()
    if fault := fault_of(machine, "benchmarks.grpo_step is for CPUs"):
        print(fault)
        return 2
    gpus = arguments.gpus or len(machine.visible)
    print(f"{gpus} x {machine.visible[0].name}, driver {machine.visible[0].driver}, torch {machine.torch}")
    for size in arguments.sizes:
        print("\n".join(report(measure(size, gpus, arguments.steps, arguments.set))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
