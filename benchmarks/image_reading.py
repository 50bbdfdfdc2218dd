"""Seconds to read and process an image, compared with the training of a group of samples of its prompt.

`python -m benchmarks.image_reading [--width 1024] [--height 768] [--repeats 5]` writes a JPEG file, reads the file as
the data module does, and makes the inputs with the image processors of four families, with the sizes of their published
models. The group is 8 samples of 128 tokens in a packed row, for a policy of 5 M parameters with a vision tower of 3 M
parameters: larger policies take longer. The benchmark also prints the bytes of the inputs, and how many images fit in
1 GiB. All times are seconds of one core (`time.process_time`), so other work of the machine changes the times little.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from benchmarks.packing import VOCABULARY, seconds
from benchmarks.policies import save_vision_language_policy
from benchmarks.shared_prompts import BUDGET, IMAGE_SIZE, PATCH, WITH_IMAGE, samples
from rl_plugins.data.images import read_images
from rl_plugins.data.parquet import LocatedRow
from rl_plugins.models.loading import load_causal_lm


def processors() -> dict[str, Any]:
    """Return image processors with the sizes of published models: LLaVA 1.5, Gemma 3, Qwen2.5-VL and Idefics 3."""
    from transformers import (
        CLIPImageProcessorPil,
        Gemma3ImageProcessorPil,
        Idefics3ImageProcessorPil,
        Qwen2VLImageProcessorPil,
    )

    return {
        "llava": CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
        "gemma3": Gemma3ImageProcessorPil(size={"height": 896, "width": 896}),
        "qwen2_5_vl": Qwen2VLImageProcessorPil(),
        "idefics3": Idefics3ImageProcessorPil(),
    }


def photo(width: int, height: int) -> bytes:
    """Return a JPEG file with large and small details, like a photo."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, height // 32, width // 32, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
    pixels = (smooth + 0.05 * torch.randn(3, height, width, generator=generator)).clamp(0, 1)
    file = io.BytesIO()
    Image.fromarray((255 * pixels.permute(1, 2, 0)).byte().numpy()).save(file, "JPEG", quality=90)
    return file.getvalue()


def core_seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median of the seconds of one core; the first run is a warm-up."""
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return median(taken[1:])


def group_seconds(repeats: int) -> float:
    """Return the seconds of a forward and backward pass over a group of samples."""
    image = torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        save_vision_language_policy(Path(folder), pixels=IMAGE_SIZE, patch=PATCH, vocab_size=VOCABULARY)
        model = load_causal_lm(folder, dtype=torch.float32)
    group = samples(*WITH_IMAGE, shared=True, image=image)
    return core_seconds(lambda: seconds(model, group, BUDGET, packing=True), repeats)


def main() -> None:
    """Print the seconds of reading and processing, the share of a group's training, and the images in 1 GiB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--height", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    row = LocatedRow({"images": [photo(arguments.width, arguments.height)]}, "image")
    reading = core_seconds(lambda: read_images(row), arguments.repeats)
    group = group_seconds(arguments.repeats)
    images = read_images(row)
    size = f"{arguments.width} x {arguments.height} pixels"
    print(f"{size}: reading {1e3 * reading:.0f} ms; training of a group {1e3 * group:.0f} ms")
    for family, processor in processors().items():
        processing = core_seconds(lambda: processor(images=images, return_tensors="pt"), arguments.repeats)  # noqa: B023
        inputs = processor(images=images, return_tensors="pt")
        share = (reading + processing) / group
        kept = sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor))
        print(
            f"{family}: processing {1e3 * processing:.0f} ms; reading and processing {share:.1%} of the group; "
            f"inputs of {kept / 1e6:.1f} MB, {2**30 // kept} images in 1 GiB"
        )


if __name__ == "__main__":
    main()
