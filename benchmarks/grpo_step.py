"""Seconds of an RL step by phase, compared with the same work in a single process with Hugging Face generate.

`python -m benchmarks.grpo_step [--sizes quickstart 28m] [--steps 8] [--against plain trl trl-bf16]
[--set run.deterministic=true]` prints one table per size. The runs follow each other on this machine. The recipe runs
two workers with one thread each, and vLLM with two threads while the workers wait. The alternatives, a plain loop and
TRL's trainer (which must be installed), run one process with two threads. The last line is a lower limit: the matrix
products of the step at the rate of large products.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.plan_work import work_of
from benchmarks.policies import save_28m, save_prompts
from benchmarks.runs import TIMEOUT_S, run_grpo, started
from rl_plugins.planning.workload import Workload, micro_batch_sizes

GIB = 2**30
_MATRIX_ROWS = 1536
SIZES = {
    # prompts, samples, new tokens, largest number of prompt tokens, samples of a micro-batch
    "quickstart": (32, 8, 8, 24, 256),
    "28m": (16, 4, 128, 64, 16),
}


def prepare(size: str, folder: Path) -> int:
    """Write the policy and the data of a size, and return the number of parameters."""
    if size == "28m":
        save_prompts(folder / "data")
        return save_28m(folder / "policy")
    from transformers import AutoModelForCausalLM

    from rl_plugins.data.prepare.files import write_splits
    from rl_plugins.data.prepare.tasks import addition_rows
    from rl_plugins.models.tiny import save_tiny_policy

    write_splits(addition_rows(below=50, num_train=512, num_test=16, seed=0), folder / "data")
    save_tiny_policy(folder / "policy")
    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder / "policy").parameters())


ALTERNATIVES = {
    "plain": ["benchmarks.plain_loop"],
    "trl": ["benchmarks.trl_loop"],
    "trl-bf16": ["benchmarks.trl_loop", "--bf16"],
}


def compare(size: str, steps: int, overrides: list[str], alternatives: list[str]) -> None:
    """Run the recipe and the alternatives, and print."""
    prompts, samples, max_tokens, prompt_tokens, micro_batch = SIZES[size]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = prepare(size, folder)
        options = [
            f"batch.prompts_per_step={prompts}",
            f"batch.samples_per_prompt={samples}",
            f"batch.tokens_per_micro_batch={micro_batch * (prompt_tokens + max_tokens)}",
            f"sampling.max_tokens={max_tokens}",
            f"data.max_prompt_tokens={prompt_tokens}",
            *overrides,
        ]
        planned = work_of(folder / "policy", options)
        recipe_run = run_grpo(folder, f"run.steps={steps}", *options)
        work = [
            f"{folder}/policy", f"{folder}/data/train.parquet",
            "--prompts", str(prompts), "--samples", str(samples), "--max-tokens", str(max_tokens),
            "--micro-batch", str(micro_batch), "--steps", str(steps),
        ]  # fmt: skip
        alternative_runs = {name: run_alternative(ALTERNATIVES[name], work) for name in alternatives}
    print(f"\n{size}: {parameters / 1e6:.1f} M parameters, {prompts} x {samples} samples, {max_tokens} new tokens")
    print("  seconds by phase: " + ", ".join(f"{name} {value:.3f}" for name, value in recipe_run.phases().items()))
    phases, step = recipe_run.phases(), recipe_run.median("time/step")
    moving = sum(phases.get(name, 0.0) for name in ("offload", "reload"))
    update = phases.get("update_weights", 0.0)
    print(f"  of a step: weights to the engine {update / step:.1%}, memory given up and taken back {moving / step:.1%}")
    peaks = ", ".join(f"{kind} {value / GIB:.2f} GiB" for kind, value in recipe_run.peak_bytes.items())
    print(f"  peak memory: {peaks}")
    print(f"  {'':12}{'s/step':>10}{'samples/s':>12}{'GiB':>8}{'samples/s here, times theirs':>32}")
    here = recipe_run.median("samples_per_s")
    print(f"  {'here':12}{step:10.2f}{here:12.2f}")
    for name, result in alternative_runs.items():
        numbers = f"{result['seconds']['step']:10.2f}{result['samples_per_s']:12.2f}{result['peak_bytes'] / GIB:8.2f}"
        print(f"  {name:12}{numbers}{here / result['samples_per_s']:32.2f}")
    rate = matrix_rate(planned.dtype, planned.policy.hidden, planned.policy.intermediate)
    floor = step_floor_s(replace(planned, response_tokens=recipe_run.median("train/response_length")), rate)
    times = ", ".join(f"{name} {result['seconds']['step'] / floor:.2f}" for name, result in alternative_runs.items())
    print(
        f"  matrix products alone take {floor:.2f} s at the {rate / 1e9:.0f} GFLOP/s that this processor reaches in "
        f"{planned.dtype}: {floor / step:.0%} of a step here"
        + (f"; that would be times theirs: {times}" if times else "")
    )


def run_alternative(module: list[str], work: list[str]) -> dict[str, Any]:
    """Run an alternative on the same work, and return the figures of its last line.

    Raises:
        RuntimeError: the alternative failed. The message ends with its error output.
        TimeoutExpired: the alternative has not ended after `TIMEOUT_S` seconds, and was ended.
    """
    command = [sys.executable, "-m", module[0], *work, *module[1:]]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}:\n{errors[-4000:]}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def matrix_rate(dtype_name: str, hidden: int, intermediate: int) -> float:
    """Return the operations per second of all cores in matrix products of an MLP; the best of several tries counts."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    dtype = getattr(torch, dtype_name)
    states, weights = torch.randn(_MATRIX_ROWS, hidden).to(dtype), torch.randn(intermediate, hidden).to(dtype)
    best = float("inf")
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.linear(states, weights)
        best = min(best, time.perf_counter() - start)
    return 10 * 2 * _MATRIX_ROWS * hidden * intermediate / best


def step_floor_s(work: Workload, rate: float) -> float:
    """Return the seconds of the matrix products of a step.

    Every response token needs one forward pass in sampling, and a forward and a backward pass in training. Sampling and
    training read each prompt once for all its samples.

    Args:
        work: work of the step.
        rate: operations per second.
    """
    shape, sampled = work.policy, work.responses * work.response_tokens
    sampling = shape.forward_flops(sampled, work.prompt_tokens + work.response_tokens / 2)
    sampling += shape.forward_flops(work.prompts * work.prompt_tokens, work.prompt_tokens / 2)
    sizes = micro_batch_sizes(work, 1)
    training = 3 * shape.forward_flops(sizes.tokens, sizes.context)
    return (sampling + training) / rate


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=8, help="steps of each run; medians leave out the first two")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the recipe")
    parser.add_argument("--against", nargs="*", choices=ALTERNATIVES, default=["plain"], help="what to compare with")
    arguments = parser.parse_args()
    for size in arguments.sizes:
        compare(size, arguments.steps, arguments.set, arguments.against)


if __name__ == "__main__":
    main()
