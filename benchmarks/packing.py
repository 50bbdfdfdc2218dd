"""Trained tokens per second of packed and padded samples: forward and backward passes of one rank in a step.

`python -m benchmarks.packing [--threads 1] [--repeats 5]` uses a policy of 5 M parameters. The mean length of samples
is a third of the largest length. Both ways work like the stage: micro-batches by a token budget, log-probs, backward.
With the larger budget all samples are in one micro-batch, padded to the longest sample. With the smaller budget there
are several micro-batches, and padded samples are sorted by length, which leaves little padding. The ways run in turn,
so other work of the machine slows all ways equally.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.policies import save_policy
from rl_plugins.data.experience import Experience
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.stages.micro_batches import Cutter, Lengths

VOCABULARY = 8192
SAMPLES = 16
PROMPT_TOKENS = 16
LONGEST = 240
BUDGETS = {"one micro-batch": SAMPLES * LONGEST, "several micro-batches": 512}
TARGET = 1.8


def samples() -> Experience:
    """Return random tokens: prompts of equal length, one response of the largest length, other lengths by chance."""
    generator = torch.Generator().manual_seed(0)
    longest = LONGEST - PROMPT_TOKENS
    draws_B = -torch.rand(SAMPLES - 1, generator=generator).log()
    left = SAMPLES * (LONGEST / 3 - PROMPT_TOKENS) - longest
    lengths_B = [longest, *(draws_B / draws_B.sum() * left).clamp(1, longest).round().int().tolist()]

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    return Experience.from_responses(
        [tokens(PROMPT_TOKENS) for _ in range(SAMPLES)], [tokens(length) for length in lengths_B], 0
    )


def seconds(model: Any, experience: Experience, budget: int, *, packing: bool) -> float:
    """Return the seconds of a forward and backward pass over the samples."""
    start = time.perf_counter()
    for indices in Cutter(budget, packing, packing, lambda largest: largest).indices(Lengths.of(experience)):
        micro = experience[indices].trimmed()
        result = response_log_probs(model, **micro.forward_inputs, packed=packing)
        result.log_probs_BT[micro.response_mask.bool()].sum().backward()
    return time.perf_counter() - start


def prepared(description: str | None) -> tuple[Any, int]:
    """Return the policy and the number of measurements from the command line of a benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        save_policy(Path(folder), hidden_size=256, num_layers=4, intermediate_size=704, vocab_size=VOCABULARY)
        model = load_causal_lm(folder, dtype=torch.float32)
    return model, arguments.repeats


def main() -> None:
    """Print the tokens per second of both ways and their ratio."""
    model, repeats = prepared(__doc__)
    experience = samples()
    lengths_B = experience.sequence_lengths.double()
    print(f"{SAMPLES} samples of {lengths_B.mean():.0f} tokens on average, {lengths_B.max():.0f} at most")
    ways = [(name, packing) for name in BUDGETS for packing in (True, False)]
    taken: dict[tuple[str, bool], list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for name, packing in ways:
            taken[name, packing].append(seconds(model, experience, BUDGETS[name], packing=packing))
    for name in BUDGETS:
        # The first pass of each way is a warm-up.
        packed, padded = taken[name, True][1:], taken[name, False][1:]
        rates = [float(lengths_B.sum()) / median(times) for times in (packed, padded)]
        ratio = median(slow / fast for fast, slow in zip(packed, padded, strict=True))
        print(f"{name}: packed {rates[0]:.0f}, padded {rates[1]:.0f} tokens/s; {ratio:.2f} times as fast")
    print(f"target in one micro-batch: {TARGET}")


if __name__ == "__main__":
    main()
