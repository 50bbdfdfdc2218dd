"""Memory of an image on the way from a prompt to the policy: a group of samples compared with one sample.

`python -m benchmarks.image_memory [--pixels 448] [--samples 8]` makes samples of a prompt with one image, and measures
the bytes of the request to an engine, of the images of a rank's samples, of a move of the samples to another rank, of a
file of the samples, and of the images in a packed and in a padded micro-batch. The last place is a padded micro-batch
whose samples share no image. The target for the other ratios is 1.2.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.policies import image_tokens, save_vision_language_policy
from rl_plugins.data.experience import Experience
from rl_plugins.data.images import IMAGE_INPUTS, PROMPT_IMAGES, PromptImages
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.packing import pack
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.vllm.fleet_sampling import without_inputs
from rl_plugins.stages.sampling import PromptSampler
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.vision_language import padded_inputs

PATCH = 32
VOCABULARY = 8192
RESPONSE_TOKENS = 16
TARGET = 1.2
UNSHARED = "padded micro-batch, an image of its own for each sample"


def bytes_of(pixels: int, count: int, model: Any) -> dict[str, int]:
    """Return the bytes at each place for `count` samples of one prompt."""
    prompts = prompt_with_image(pixels)
    sampler = PromptSampler(SingleDeviceRolloutStrategy(), build_tokenizer(), seed=0)
    responses = [[60 + number] * RESPONSE_TOKENS for number in range(count)]
    log_probs = [[0.0] * RESPONSE_TOKENS for _ in responses]
    generations = Generations.from_responses(responses, log_probs, ["stop"] * count, 0)
    samples = sampler.experience(prompts, generations, count, [0])
    # The number of samples is a setting of all requests.
    request = without_inputs(sampler.request(0, prompts, 0, seed=0))
    with tempfile.TemporaryDirectory() as folder:
        samples.save(Path(folder) / "samples")
        saved = (Path(folder) / "samples").stat().st_size
    inputs: dict[str, Any] = {**samples.forward_inputs}
    width = inputs.pop("response_width")
    copies = [{**images} for images in inputs["image_inputs_B"]]
    return {
        "request to an engine": len(pickle.dumps([request])),
        "samples of a rank": distinct_bytes(samples),
        "move to another rank": len(pickle.dumps(samples.compact())),
        "file": saved,
        "packed micro-batch": pixel_bytes(pack(model, **inputs, response_width=width).inputs.arguments),
        "padded micro-batch": pixel_bytes(padded_inputs(model, **inputs).arguments),
        UNSHARED: pixel_bytes(padded_inputs(model, **{**inputs, "image_inputs_B": copies}).arguments),
    }


def prompt_with_image(pixels: int) -> PromptBatch:
    """Return a prompt with a random image, as the data module serves it."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(1, 3, pixels, pixels, generator=generator)
    image = Image.fromarray((255 * values[0].permute(1, 2, 0)).byte().numpy())
    ids = [*image_tokens(pixels, PATCH, VOCABULARY), 60, 61, 62]
    images = PromptImages({"pixel_values": values}, [image], [ids[0], 60, 61, 62], len(ids))
    columns: dict[str, list[Any]] = {"prompt": [[{"role": "user", "content": "<image>abc"}]], PROMPT_IMAGES: [images]}
    return PromptBatch([ids], [0], columns, epoch=0)


def distinct_bytes(samples: Experience) -> int:
    """Return the bytes of the images of samples, each object once."""
    distinct = {id(inputs): inputs for inputs in samples.columns[IMAGE_INPUTS]}
    return sum(pixel_bytes(inputs) for inputs in distinct.values())


def pixel_bytes(inputs: Any) -> int:
    """Return the bytes of the pixels in the arguments of a forward pass."""
    return int(inputs["pixel_values"].nbytes)


def main() -> None:
    """Print the bytes at each place for one sample and for a group, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pixels", type=int, default=448, help="width and height of the image, a multiple of 32")
    parser.add_argument("--samples", type=int, default=8, help="number of samples of the group")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_vision_language_policy(Path(folder), pixels=arguments.pixels, patch=PATCH, vocab_size=VOCABULARY)
        model = load_causal_lm(folder, dtype=torch.float32)
    one, group = (bytes_of(arguments.pixels, count, model) for count in (1, arguments.samples))
    print(f"an image of {arguments.pixels} x {arguments.pixels} pixels; KB for 1 and for {arguments.samples} samples")
    for place, size in one.items():
        print(f"{place}: {size / 1e3:.0f}, {group[place] / 1e3:.0f}; ratio {group[place] / size:.2f}")
    print(f"target, but for the last place: {TARGET}")


if __name__ == "__main__":
    main()
