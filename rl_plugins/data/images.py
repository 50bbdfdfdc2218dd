"""Images of rows: the column `images`, and `<image>` in the messages at the place of each image, as in verl's files.

An image is the path of a file, its bytes, a mapping with `bytes` or `path` (as `datasets` writes images), or an image
of PIL. A relative path starts at the folder of the data file.
"""

from __future__ import annotations

import base64
import io
import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_plugins.data.content_parts import IMAGES, PLACEHOLDER, has_values
from rl_plugins.data.parquet import LocatedRow, PromptRows, Row
from rl_plugins.errors import ConfigError, RowError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

ImageInputs = Mapping[str, "Tensor"]
"""Inputs of a model for the images of one sample, by the name of the argument; the first axis counts images or
patches."""

IMAGE_INPUTS = "image_inputs"
"""Name of the column, and of arguments, with the inputs of a model for the images of each sample."""
PROMPT_IMAGES = "prompt_images"
"""Name of the column with the `PromptImages` of each prompt, None for a prompt without images."""
UNSEEN = (
    "the rows have images, and a stateful environment or an agent begins with messages of text alone: leave the column "
    "`images` out"
)
IMAGE_FAULT = "image_fault"
"""Name of the column with the fault of each prompt whose images became bad after the start; None for other prompts."""
_THUMBNAIL = 128
"""Largest width and height of a thumbnail, in pixels."""
_DAMAGED = (OSError, SyntaxError, ValueError, TypeError, RuntimeError, EOFError, struct.error, zlib.error)
"""Errors of PIL for a damaged file, by the format of the file: RuntimeError for AVIF and DDS, TypeError for TIFF."""
COLUMN = f"column {IMAGES!r}"
"""Name of the column in the message of a RowError."""


@dataclass(frozen=True)
class PromptImages:
    """Images of a prompt.

    Attributes:
        inputs: inputs of the policy for the images.
        images: the images in the mode RGB, for a rollout engine that makes inputs by itself.
        placeholder_ids: token ids of the prompt with a single placeholder for each image.
        num_tokens: number of tokens of the prompt with all tokens of the images.
    """

    inputs: ImageInputs
    images: Sequence[Image]
    placeholder_ids: list[int]
    num_tokens: int

    def with_placeholders(self, token_ids: list[int]) -> list[int]:
        """Return a sequence that begins with the prompt, with a single placeholder for each image.

        Args:
            token_ids: the prompt with all tokens of the images, and further tokens.
        """
        return [*self.placeholder_ids, *token_ids[self.num_tokens :]]

    def state(self) -> dict[str, Any]:
        """Return the images for `torch.save`, as tensors."""
        import torch

        pixels = [torch.from_numpy(np.array(image)) for image in self.images]
        return {**vars(self), "inputs": dict(self.inputs), "images": pixels}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PromptImages:
        """Return the images of a `state`."""
        from PIL import Image

        return cls(**{**state, "images": [Image.fromarray(pixels.numpy()) for pixels in state["images"]]})

    def without_inputs(self) -> PromptImages:
        """Return the images for another process, which makes inputs by itself."""
        return replace(self, inputs={})


def thumbnail(image: Image) -> str:
    """Return a small copy of an image as the address of an `<img>` element (a data URI)."""
    from PIL import ImageOps

    file = io.BytesIO()
    ImageOps.contain(image, (min(_THUMBNAIL, image.width), min(_THUMBNAIL, image.height))).save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def inputs_of(images: Sequence[PromptImages | None]) -> list[ImageInputs | None]:
    """Return the inputs of the images of each prompt, None for a prompt without images."""
    return [None if of_prompt is None else of_prompt.inputs for of_prompt in images]


def num_patches(inputs: ImageInputs, patch_size: int) -> int:
    """Return the number of patches of images, padding included.

    Args:
        inputs: inputs of a model for the images.
        patch_size: width and height of a patch in pixels.

    Raises:
        ConfigError: the inputs have no pixels.
    """
    if "pixel_values" not in inputs:
        raise ConfigError(
            f"patches_per_micro_batch: the processor makes {', '.join(inputs)} of an image, and no pixel_values: leave "
            "patches_per_micro_batch out"
        )
    shape = inputs["pixel_values"].shape
    if len(shape) < 4:  # The values of each patch, and not of each image.
        return math.prod(shape[:-1])
    *images, _, height, width = shape
    return math.prod(images) * (height // patch_size) * (width // patch_size)


def has_images(row: Row) -> bool:
    """Return True if a row has an image."""
    return has_values(row, IMAGES)


def any_has_images(rows: PromptRows) -> bool:
    """Return True if one of the rows has an image. Rows without the column `images` are not read."""
    return IMAGES in rows.columns and any(map(has_images, rows))


def check_places(row: LocatedRow) -> None:
    """Check that the messages of a row with images have one `<image>` for each image.

    Raises:
        RowError: the column is no list, or the numbers differ.
    """
    values = row.columns[IMAGES]
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise RowError(row.location, COLUMN, f"expected a list of images, got {type(values).__name__}")
    places = sum(message["content"].count(PLACEHOLDER) for message in row.columns["prompt"])
    if places != len(values):
        raise RowError(
            row.location,
            COLUMN,
            f"the row has {len(values)} images, and its messages have {PLACEHOLDER} {places} times: write "
            f"{PLACEHOLDER} once for each image",
        )


def read_images(row: LocatedRow) -> list[Image]:
    """Read the images of a row, upright and in the mode RGB. The row has images, and passed `check_places`.

    Raises:
        RowError: an image cannot be read.
    """
    return [_read(value, row, position) for position, value in enumerate(row.columns[IMAGES])]


def in_parts(messages: Sequence[Mapping[str, Any]], *, images: bool) -> list[dict[str, Any]]:
    """Return messages with lists of parts in the place of texts, as chat templates of vision-language models want.

    Args:
        messages: messages with texts.
        images: True if `<image>` is the place of an image, False if it is a text like any other.
    """
    parts = _parts if images else lambda text: [{"type": "text", "text": text}]
    return [{**message, "content": list(parts(message["content"]))} for message in messages]


def _parts(text: str) -> Iterator[dict[str, str]]:
    for position, part in enumerate(text.split(PLACEHOLDER)):
        if position:
            yield {"type": "image"}
        if part:
            yield {"type": "text", "text": part}


def _in_rgb(image: Image) -> Image:
    """Return an image in the mode RGB. Transparent pixels show a white background, as in vLLM.

    Raises:
        ValueError: the range of the pixels is unknown.
    """
    from PIL import Image

    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of the mode {image.mode!r} have no known range, and 8 or 16 bits have")
    if image.mode.startswith("I;16"):
        # PIL would cut off the values above 255.
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = image.convert("RGBA")
    background = Image.new("RGB", image.size, "white")
    background.paste(opaque, mask=opaque.getchannel("A"))
    return background


def _read(value: Any, row: LocatedRow, position: int) -> Image:
    from PIL import Image, ImageOps, UnidentifiedImageError

    name = f"image {position}"
    try:
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str | os.PathLike):
            path = Path(value) if row.folder is None else row.folder / value
            name, value = f"image {position} ({path})", path.read_bytes()
        with warnings.catch_warnings():
            # PIL only warns of a file whose image fills the memory.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(value)) if isinstance(value, bytes) else value
            if isinstance(opened, Image.Image) and opened.width and opened.height:
                # PIL reads the pixels here, also of a file that a data set has opened.
                return _in_rgb(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError:
        raise RowError(row.location, COLUMN, f"{name} is no image that PIL knows: write it as PNG or JPEG") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise RowError(row.location, COLUMN, f"{name} is too large ({error}): make it smaller") from None
    except _DAMAGED as error:
        raise RowError(row.location, COLUMN, f"{name} cannot be read ({error}): write the file again") from None
    if not isinstance(opened, Image.Image):
        raise RowError(
            row.location,
            COLUMN,
            f"{name} is {type(value).__name__}: give a path, bytes, a mapping with `bytes` or `path`, or a PIL image",
        )
    raise RowError(row.location, COLUMN, f"{name} has the size {opened.width}x{opened.height}: leave it out")
