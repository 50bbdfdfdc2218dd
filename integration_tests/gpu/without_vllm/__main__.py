"""Command line: run sections one after the other, print a table, and write the results as lines of JSON.

The exit status is 0 if no case failed, 1 if a case failed, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from integration_tests.gpu.without_vllm.program import SECTIONS, run_section
from integration_tests.gpu.without_vllm.results import FAILED


def main() -> int:
    """Run and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.gpu.without_vllm", description=__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION",
                        help=f"default: all ({', '.join(SECTIONS)})")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the program, tiny sizes")
    parser.add_argument("--output", type=Path, default=Path("gpu_results.jsonl"), help="file of the results; replaced")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not _has_gpu():
        print("torch shows no CUDA device: rl-plugins doctor names the cause; --device cpu tries the program without")
        return 2
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("")
    counts: Counter[str] = Counter()
    for name in arguments.sections:
        for result in run_section(name, SECTIONS[name], arguments.device, arguments.output):
            print(result.row(), flush=True)
            counts[result.status] += 1
    print(", ".join(f"{count} {status}" for status, count in counts.items()) + f"; results: {arguments.output}")
    return 1 if counts[FAILED] else 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
