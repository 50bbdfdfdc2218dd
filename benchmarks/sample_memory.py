"""Memory of `rl-plugins generate` and `rl-plugins evaluate` on small and large files.

`python -m benchmarks.sample_memory [--megabytes 30 300]` writes a parquet file of each size with one row group. A tiny
policy answers every prompt, and the answers are scored. Each command runs in a separate process. The benchmark prints
the seconds and the peak of anonymous memory, without pages of files, which the kernel can always reclaim.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.data_memory import TIMEOUT_S, peak_memory, write_file

ANSWER_TOKENS = 8


def measure(arguments: list[str]) -> dict[str, float]:
    """Run a command in this process."""
    from rl_plugins.commands.main import main as command

    start = time.perf_counter()
    with peak_memory() as peak:
        status = command(arguments)
    if status:
        raise SystemExit(status)
    return {"peak_mb": peak[0] / 2**20, "seconds": time.perf_counter() - start}


def main() -> None:
    """Measure both commands on all sizes, or one command in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[30, 300])
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options.run)))
        return
    from rl_plugins.models.tiny import save_tiny_policy

    print("| | rows | peak memory, MB | s |\n|---|---|---|---|")
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            rows = write_file(folder / "prompts.parquet", megabytes)
            save_tiny_policy(folder / "tiny")
            samples = str(folder / "samples.parquet")
            commands = (
                ["generate", str(folder / "tiny"), "--data", str(folder / "prompts.parquet"), "--output", samples,
                 "--engine", "transformers", "--max-tokens", str(ANSWER_TOKENS)],
                ["evaluate", samples, "--reward", "exact_match"],
            )  # fmt: skip
            for arguments in commands:
                command = [sys.executable, "-m", "benchmarks.sample_memory", "--run", json.dumps(arguments)]
                result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
                numbers = json.loads(result.stdout.splitlines()[-1])
                shown = f"{numbers['peak_mb']:.0f} | {numbers['seconds']:.0f}"
                print(f"| {arguments[0]}, {megabytes} MB | {rows} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
