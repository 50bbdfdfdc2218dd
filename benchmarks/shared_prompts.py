"""Trained samples per second with a shared prompt for a group, compared with a separate prompt for each sample.

`python -m benchmarks.shared_prompts [--threads 1] [--repeats 5]` uses a policy of 5 M parameters, packed samples, and
the forward and backward passes of one rank in a step. For each size, a group of samples has either one prompt, which is
computed once, or as many prompts as samples. Both cases run in turn, so other work of the machine slows both equally.
"""

from __future__ import annotations

from statistics import median

import torch

from benchmarks.packing import VOCABULARY, prepared, seconds
from rl_plugins.data.experience import Experience

BUDGET = 4096
SIZES = [(64, 128, 4), (64, 128, 8), (256, 128, 8), (512, 64, 8), (16, 240, 8)]
"""Tokens of a prompt, of a response on average, samples of a prompt."""


def samples(prompt: int, response: int, group: int, *, shared: bool) -> Experience:
    """Return random tokens of a group. Response lengths are between 0.5 and 1.5 times the mean."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    lengths = torch.linspace(0.5 * response, 1.5 * response, group).round().int().tolist()
    own = tokens(prompt)
    return Experience.from_responses(
        [own if shared else tokens(prompt) for _ in lengths], [tokens(length) for length in lengths], 0
    )


def main() -> None:
    """Print the samples per second of both cases and their ratio for each size."""
    model, repeats = prepared(__doc__)
    for prompt, response, group in SIZES:
        ways = {shared: samples(prompt, response, group, shared=shared) for shared in (True, False)}
        taken: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats + 1):
            for shared, experience in ways.items():
                taken[shared].append(seconds(model, experience, BUDGET, packing=True))
        # The first pass of each case is a warm-up.
        once, each = taken[True][1:], taken[False][1:]
        ratio = median(slow / fast for fast, slow in zip(once, each, strict=True))
        print(
            f"{group} samples of {prompt} + {response} tokens: the prompt once {group / median(once):.1f}, "
            f"for each {group / median(each):.1f} samples/s; {ratio:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
