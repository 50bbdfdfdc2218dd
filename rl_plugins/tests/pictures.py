"""Pictures, and rows with pictures."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (32, 32)) -> Image.Image:
    """Return a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of a file of a kind."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def row(text: str, *images: Any, answer: str = "yes") -> dict[str, Any]:
    """Return a row with images."""
    return {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "pictures",
        "ability": "sight",
        "reward_model": {"ground_truth": answer},
        "extra_info": {"split": "train"},
        "images": list(images),
    }
