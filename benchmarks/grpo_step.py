"""Seconds of an RL step by phase, and the same work in a plain single-process loop with Hugging Face generate.

`python -m benchmarks.grpo_step [--sizes quickstart 28m] [--steps 8] [--set run.deterministic=true]` prints one table
per size. Both run on this machine one after the other: here two ZeRO-3 workers and one vLLM engine with one thread
each, there one process with two threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

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

    from rl_plugins.data.prepare.addition import addition_rows
    from rl_plugins.data.prepare.writing import write_splits
    from rl_plugins.models.tiny import save_tiny_policy

    write_splits(addition_rows(below=50, num_train=512, num_test=16, seed=0), folder / "data")
    save_tiny_policy(folder / "policy")
    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder / "policy").parameters())


def compare(size: str, steps: int, overrides: list[str]) -> None:
    """Run both and print."""
    prompts, samples, max_tokens, prompt_tokens, micro_batch = SIZES[size]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = prepare(size, folder)
        ours = run_grpo(
            folder,
            f"run.steps={steps}",
            f"batch.prompts_per_step={prompts}",
            f"batch.samples_per_prompt={samples}",
            f"batch.tokens_per_micro_batch={micro_batch * (prompt_tokens + max_tokens)}",
            f"sampling.max_tokens={max_tokens}",
            f"data.max_prompt_tokens={prompt_tokens}",
            *overrides,
        )
        command = [
            sys.executable, "-m", "benchmarks.plain_loop", f"{folder}/policy", f"{folder}/data/train.parquet",
            "--prompts", str(prompts), "--samples", str(samples), "--max-tokens", str(max_tokens),
            "--micro-batch", str(micro_batch), "--steps", str(steps),
        ]  # fmt: skip
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    plain = json.loads(output.splitlines()[-1])
    print(f"\n{size}: {parameters / 1e6:.1f} M parameters, {prompts} x {samples} samples, {max_tokens} new tokens")
    print("  seconds by phase: " + ", ".join(f"{name} {value:.3f}" for name, value in ours.phases().items()))
    peaks = ", ".join(f"{kind} {value / GIB:.2f} GiB" for kind, value in ours.peak_bytes.items())
    print(f"  peak memory: {peaks}; plain loop {plain['peak_bytes'] / GIB:.2f} GiB")
    print(f"  {'':14}{'here':>10}{'plain loop':>12}{'ratio':>8}")
    for label, mine, theirs in (
        ("s/step", ours.median("time/step"), plain["seconds"]["step"]),
        ("samples/s", ours.median("samples_per_s"), plain["samples_per_s"]),
        ("tokens/s", ours.median("tokens_per_s"), plain["tokens_per_s"]),
    ):
        print(f"  {label:14}{mine:10.2f}{theirs:12.2f}{mine / theirs:8.2f}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=8, help="steps of each run; medians leave out the first two")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the recipe")
    arguments = parser.parse_args()
    for size in arguments.sizes:
        compare(size, arguments.steps, arguments.set)


if __name__ == "__main__":
    main()
