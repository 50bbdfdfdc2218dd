"""Command line of the loops for comparison."""

from __future__ import annotations

import argparse


def loop_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the options of a loop."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("policy")
    parser.add_argument("parquet")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=6)
    parser.add_argument("--micro-batch", type=int, default=256, help="samples of one forward and backward pass")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    return parser
