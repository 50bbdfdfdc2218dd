"""Seconds of an RL step by phase, and the same work in a single process with Hugging Face generate.

`python -m benchmarks.grpo_step [--sizes quickstart 28m] [--steps 8] [--against plain trl trl-bf16]
[--set run.deterministic=true]` prints one table per size. All run on this machine one after the other: here two workers
and vLLM with one thread each, there one process with two threads, a plain loop or TRL's trainer (which has to be
installed).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.matrix_floor import matrix_rate, step_floor_s
from benchmarks.plan_work import work_of
from benchmarks.policies import save_28m, save_prompts
from benchmarks.runs import TIMEOUT_S, run_grpo

GIB = 2**30
SIZES = {
    # prompts, samples, new tokens, tokens of a prompt at most, samples of a micro-batch
    "quickstart": (32, 8, 8, 24, 256),
    "28m": (16, 4, 128, 64, 16),
}


def prepare(size: str, folder: Path) -> int:
    """Write the policy and the data of a size; returns the number of parameters."""
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
    """Run both and print."""
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
        ours = run_grpo(folder, f"run.steps={steps}", *options)
        work = [
            f"{folder}/policy", f"{folder}/data/train.parquet",
            "--prompts", str(prompts), "--samples", str(samples), "--max-tokens", str(max_tokens),
            "--micro-batch", str(micro_batch), "--steps", str(steps),
        ]  # fmt: skip
        theirs = {name: run_alternative(ALTERNATIVES[name], work) for name in alternatives}
    print(f"\n{size}: {parameters / 1e6:.1f} M parameters, {prompts} x {samples} samples, {max_tokens} new tokens")
    print("  seconds by phase: " + ", ".join(f"{name} {value:.3f}" for name, value in ours.phases().items()))
    phases, step = ours.phases(), ours.median("time/step")
    moving = sum(phases.get(name, 0.0) for name in ("offload", "reload"))
    update = phases.get("update_weights", 0.0)
    print(f"  of a step: weights to the engine {update / step:.1%}, memory given up and taken back {moving / step:.1%}")
    peaks = ", ".join(f"{kind} {value / GIB:.2f} GiB" for kind, value in ours.peak_bytes.items())
    print(f"  peak memory: {peaks}")
    print(f"  {'':12}{'s/step':>10}{'samples/s':>12}{'GiB':>8}{'samples/s here, times theirs':>32}")
    here = ours.median("samples_per_s")
    print(f"  {'here':12}{step:10.2f}{here:12.2f}")
    for name, other in theirs.items():
        numbers = f"{other['seconds']['step']:10.2f}{other['samples_per_s']:12.2f}{other['peak_bytes'] / GIB:8.2f}"
        print(f"  {name:12}{numbers}{here / other['samples_per_s']:32.2f}")
    rate = matrix_rate(planned.dtype, planned.policy.hidden, planned.policy.intermediate)
    floor = step_floor_s(replace(planned, response_tokens=ours.median("train/response_length")), rate)
    times = ", ".join(f"{name} {other['seconds']['step'] / floor:.2f}" for name, other in theirs.items())
    print(
        f"  matrix products alone take {floor:.2f} s at the {rate / 1e9:.0f} GFLOP/s that this processor reaches in "
        f"{planned.dtype}: {floor / step:.0%} of a step here"
        + (f"; that would be times theirs: {times}" if times else "")
    )


def run_alternative(module: list[str], work: list[str]) -> dict[str, Any]:
    """What a loop that is not ours prints of the same work.

    Raises:
        RuntimeError: it failed; the message ends with what it wrote.
    """
    command = [sys.executable, "-m", module[0], *work, *module[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


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
