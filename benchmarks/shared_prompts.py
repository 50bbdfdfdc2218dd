"""Samples trained per second where those of a prompt run it once, against the same lengths with prompts of their own.

`python -m benchmarks.shared_prompts [--threads 1] [--repeats 5]`: a policy of 5 M parameters, packed samples, forward
and backward of one rank's share of a step. For each size a group of samples has one prompt, or as many as samples; the
two take turns, so that what else the machine does falls on both.
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
    """Random tokens of a group; responses between half and one and a half of their average."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    lengths = torch.linspace(0.5 * response, 1.5 * response, group).round().int().tolist()
    own = tokens(prompt)
    return Experience.from_responses(
        [own if shared else tokens(prompt) for _ in lengths], [tokens(length) for length in lengths], 0
    )


def main() -> None:
    """Print samples per second of both, and their ratio, for each size."""
    model, repeats = prepared(__doc__)
    for prompt, response, group in SIZES:
        ways = {shared: samples(prompt, response, group, shared=shared) for shared in (True, False)}
        taken: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats + 1):
            for shared, experience in ways.items():
                taken[shared].append(seconds(model, experience, BUDGET, packing=True))
        # The first pass of each is a warm-up.
        once, each = taken[True][1:], taken[False][1:]
        ratio = median(slow / fast for fast, slow in zip(once, each, strict=True))
        print(
            f"{group} samples of {prompt} + {response} tokens: the prompt once {group / median(once):.1f}, "
            f"for each {group / median(each):.1f} samples/s; {ratio:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
