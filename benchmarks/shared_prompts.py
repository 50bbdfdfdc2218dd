"""Trained samples per second with a shared prompt for a group, compared with a separate prompt for each sample.

`python -m benchmarks.shared_prompts [--threads 1] [--repeats 5]` uses a policy of 5 M parameters, packed samples, and
the forward and backward passes of one rank in a step. For each size, a group of samples has either one prompt, which is
computed once, or as many prompts as samples. Both cases run in turn, so other work of the machine slows both equally.
The last size has an image in each prompt, which a vision tower of 3 M parameters reads. This size also runs padded,
where the group has either one image, or as many images as samples.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.packing import VOCABULARY, prepared, seconds
from benchmarks.policies import image_tokens, save_vision_language_policy
from rl_plugins.data.experience import Experience
from rl_plugins.models.loading import load_causal_lm

BUDGET = 4096
SIZES = [(64, 128, 4), (64, 128, 8), (256, 128, 8), (512, 64, 8), (16, 240, 8)]
"""Tokens of a prompt, of a response on average, samples of a prompt."""
WITH_IMAGE = (64, 128, 8)
"""The same for prompts with an image, whose tokens are added to each prompt."""
IMAGE_SIZE, PATCH = 112, 8


def samples(prompt: int, response: int, group: int, *, shared: bool, image: Tensor | None = None) -> Experience:
    """Return random tokens of a group. Response lengths are between 0.5 and 1.5 times the mean.

    Args:
        prompt: tokens of a prompt.
        response: tokens of a response on average.
        group: number of samples.
        shared: all samples have one prompt.
        image: pixels of an image before each prompt.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    lengths = torch.linspace(0.5 * response, 1.5 * response, group).round().int().tolist()
    own = tokens(prompt)
    before = [] if image is None else image_tokens(IMAGE_SIZE, PATCH, VOCABULARY)
    return Experience.from_responses(
        [[*before, *(own if shared else tokens(prompt))] for _ in lengths],
        [tokens(length) for length in lengths],
        0,
        image_inputs=None if image is None else images_of(image, group, shared=shared),
    )


def images_of(image: Tensor, group: int, *, shared: bool) -> list[dict[str, Tensor]]:
    """Return the inputs of an image for each sample: one object, or an object for each sample."""
    one = {"pixel_values": image}
    return [one if shared else {**one} for _ in range(group)]


def main() -> None:
    """Print the samples per second of both cases and their ratio for each size."""
    policy, repeats = prepared(__doc__)
    image = torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        save_vision_language_policy(Path(folder), pixels=IMAGE_SIZE, patch=PATCH, vocab_size=VOCABULARY)
        reader = load_causal_lm(folder, dtype=torch.float32)
    cases: list[tuple[Any, tuple[int, int, int], Tensor | None, bool]] = [
        *((policy, size, None, True) for size in SIZES),
        *((reader, WITH_IMAGE, image, packing) for packing in (True, False)),
    ]
    for model, (prompt, response, group), pixels, packing in cases:
        ways = {shared: samples(prompt, response, group, shared=shared, image=pixels) for shared in (True, False)}
        taken: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(repeats + 1):
            for shared, experience in ways.items():
                taken[shared].append(seconds(model, experience, BUDGET, packing=packing))
        # The first pass of each case is a warm-up.
        once, each = taken[True][1:], taken[False][1:]
        ratio = median(slow / fast for fast, slow in zip(once, each, strict=True))
        size = f"{group} samples of {prompt} + {response} tokens" + (" and an image" if pixels is not None else "")
        size, part = (size, "prompt") if packing else (f"{size}, padded", "image")
        print(
            f"{size}: the {part} once {group / median(once):.1f}, for each {group / median(each):.1f} samples/s; "
            f"{ratio:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
