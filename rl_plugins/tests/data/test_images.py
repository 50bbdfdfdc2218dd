"""Images of rows: forms of images, and rows that are refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import ExifTags, Image

from rl_plugins.data.chat_template import accepted_messages
from rl_plugins.data.images import check_places, has_images, in_parts, read_images, thumbnail
from rl_plugins.data.parquet import LocatedRow, load_rows
from rl_plugins.errors import RowError
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.tests.cases import case
from rl_plugins.tests.pictures import encoded, picture, row


def here(text: str, *images: Any) -> LocatedRow:
    return LocatedRow(row(text, *images), "here")


def test_read_images_reads_each_form(tmp_path: Path) -> None:
    image = picture()
    file = tmp_path / "one.png"
    file.write_bytes(encoded(image))
    forms = {
        "path": str(file),
        "bytes": encoded(image),
        "mapping of bytes": {"bytes": encoded(image), "path": None},
        "mapping of a path": {"bytes": None, "path": str(file)},
        "PIL": image,
    }
    for name, found in zip(forms, read_images(here("<image>" * len(forms), *forms.values())), strict=True):
        with case(name):
            assert found.mode == "RGB" and np.array_equal(np.asarray(found), np.asarray(image))


def test_read_images_of_a_parquet_file_starts_at_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "one.png").write_bytes(encoded(picture()))
    pq.write_table(pa.Table.from_pylist([row("<image>?", "pictures/one.png")]), tmp_path / "rows.parquet")
    rows = load_rows(tmp_path / "rows.parquet")
    (image,) = read_images(rows.located(0))
    assert image.size == (32, 32)


def test_read_images_turns_an_image_upright() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = encoded(picture(size=(16, 32)).convert("RGBA"), exif=exif)
    (found,) = read_images(here("<image>", turned))
    assert found.mode == "RGB" and found.size == (32, 16)


def test_read_images_shows_transparent_pixels_white_and_16_bits_as_8() -> None:
    palette = Image.new("P", (2, 2))
    palette.info["transparency"] = 0
    cases: dict[str, tuple[Image.Image, tuple[int, int, int]]] = {
        "transparent": (Image.new("RGBA", (2, 2), (0, 0, 0, 0)), (255, 255, 255)),
        "half": (Image.new("LA", (2, 2), (0, 128)), (127, 127, 127)),
        "palette": (palette, (255, 255, 255)),
        "opaque": (Image.new("RGBA", (2, 2), (1, 2, 3, 255)), (1, 2, 3)),
        "16 bits": (Image.new("I;16", (2, 2), 30_000), (117, 117, 117)),
        "16 bits, white": (Image.new("I;16", (2, 2), 65_535), (255, 255, 255)),
    }
    for name, (image, pixel) in cases.items():
        (found,) = read_images(here("<image>", encoded(image)))
        with case(name):
            assert found.mode == "RGB" and found.getpixel((0, 0)) == pixel


def test_read_images_refuses_bad_images() -> None:
    huge = Image.new("1", (20_000, 10_000))
    good = encoded(picture())
    # A data set opens an image, and PIL reads the pixels later.
    opened = Image.open(io.BytesIO(good[:200]))
    unknown_format = bytearray(encoded(picture(), "DDS"))
    # Flags of the format of a pixel.
    unknown_format[80] = 153
    cases: dict[str, tuple[Any, str]] = {
        "damaged header": (bytes(unknown_format), r"image 0 cannot be read \(Unknown pixel format"),
        "other bytes": (b"text", "image 0 is no image that PIL knows"),
        "truncated": (good[:200], "image 0 cannot be read"),
        "truncated after it was opened": (opened, "image 0 cannot be read .*write the file again"),
        "no file": ("gone.png", r"image 0 cannot be read .*No such file.*gone\.png"),
        "number": (3, "image 0 is int: give a path"),
        "empty": (Image.new("RGB", (0, 5)), "image 0 has the size 0x5"),
        "huge": (encoded(huge), "image 0 is too large"),
        "floats": (Image.new("F", (2, 2)), r"image 0 cannot be read \(pixels of the mode 'F' have no known range"),
    }
    for name, (value, message) in cases.items():
        with case(name), pytest.raises(RowError, match=rf"here, column 'images': {message}"):
            read_images(here("<image>", value))


def test_check_places_wants_one_place_for_each_image() -> None:
    check_places(here("<image> and <image>", b"1", b"2"))
    for text, images, message in (
        ("<image>", [b"1", b"2"], "has 2 images, and its messages have <image> 1 times"),
        ("none", [b"1"], "has 1 images, and its messages have <image> 0 times"),
        ("<image> or <image>", [b"1"], "has 1 images, and its messages have <image> 2 times: write <image> once for"),
    ):
        with pytest.raises(RowError, match=message):
            check_places(here(text, *images))
    with pytest.raises(RowError, match="expected a list of images, got str"):
        check_places(LocatedRow({**row("<image>"), "images": "one.png"}, "here"))


def test_thumbnail_is_a_small_picture_with_the_sides_of_the_image() -> None:
    for size, expected in (((32, 16), (32, 16)), ((640, 320), (128, 64))):
        kind, content = thumbnail(picture(size=size)).split(",")
        found = Image.open(io.BytesIO(base64.b64decode(content)))
        assert kind == "data:image/jpeg;base64" and found.format == "JPEG" and found.size == expected


def test_has_images_is_false_for_an_empty_column() -> None:
    assert has_images(row("<image>", b"1"))
    assert not any(map(has_images, (row("text"), {**row("text"), "images": None}, {"prompt": []})))


def test_in_parts_keeps_the_order_of_texts_and_images() -> None:
    (plain,) = in_parts([{"role": "user", "content": "a<image>"}], images=False)
    assert plain == {"role": "user", "content": [{"type": "text", "text": "a<image>"}]}
    (message,) = in_parts([{"role": "user", "content": "a<image><image>b"}], images=True)
    assert message == {
        "role": "user",
        "content": [
            {"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "b"},
        ],
    }  # fmt: skip


def test_accepted_messages_refuses_images_for_a_policy_that_reads_text_alone() -> None:
    rows = load_rows([row("text"), row("<image>", picture())])
    with pytest.raises(RowError, match="row 1, column 'images': the row has images, which a vision-language"):
        list(accepted_messages(rows, build_tokenizer(), {}))
