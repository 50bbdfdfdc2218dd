"""Messages with lists of parts: the same rows, tokens and images as with texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.tiny_vision import processor
from rl_plugins.data.content_parts import check_parts, with_texts
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.images import PROMPT_IMAGES
from rl_plugins.data.parquet import load_rows
from rl_plugins.errors import RowError
from rl_plugins.tests.cases import case
from rl_plugins.tests.pictures import encoded, picture, row

TEXT = {"type": "text", "text": "and"}


def with_parts(*parts: dict[str, Any], images: list[Any] | None = None) -> dict[str, Any]:
    made = {**row(""), "prompt": [{"role": "user", "content": list(parts)}], "images": images}
    return made if images is not None else {name: value for name, value in made.items() if name != "images"}


def test_with_texts_puts_placeholders_into_texts_and_images_into_the_column() -> None:
    image = {"type": "image", "image": b"1"}
    assert with_texts(row("<image>?", b"1")) == row("<image>?", b"1")
    for name, found, images in (
        ("images in parts", with_parts(image, TEXT, {**image, "image": "two.png"}), [b"1", "two.png"]),
        (
            "images in the column",
            with_parts({"type": "image"}, TEXT, {"type": "image"}, images=[b"1", b"2"]),
            [b"1", b"2"],
        ),
        (
            "images in the column and in a part",
            with_parts({"type": "image"}, TEXT, {**image, "image": b"2"}, images=[b"1"]),
            [b"1", b"2"],
        ),
    ):
        with case(name):
            plain = with_texts(found)
            assert plain["prompt"] == [{"role": "user", "content": "<image>and<image>"}] and plain["images"] == images
    mixed = with_parts({**image, "image": b"2"}, images=[b"1"])
    mixed["prompt"].insert(0, {"role": "user", "content": "<image>?"})
    assert with_texts(mixed)["images"] == [b"1", b"2"]
    assert "images" not in with_texts(with_parts(TEXT))


def test_prompts_with_parts_equal_prompts_with_texts(tmp_path: Path) -> None:
    images = [encoded(picture(1)), encoded(picture(2))]
    parts = [
        with_parts({"type": "text", "text": "no picture"}),
        with_parts({"type": "image", "image": images[0]}, TEXT, {"type": "image", "image": images[1]}),
    ]
    pq.write_table(pa.Table.from_pylist(parts), tmp_path / "parts.parquet")
    batches = []
    for source in (parts, tmp_path / "parts.parquet", [row("no picture"), row("<image>and<image>", *images)]):
        data = PromptDataModule(source, tokenizer=processor("llava"), prompts_per_step=2)
        data.setup("fit")
        batches.append(next(iter(data.train_dataloader())))
    for found in batches[:2]:
        assert found.prompt_ids == batches[2].prompt_ids and found.rows == batches[2].rows
        assert found.columns["prompt"] == batches[2].columns["prompt"]
        own, other = (next(filter(None, one.columns[PROMPT_IMAGES])) for one in (found, batches[2]))
        assert [image.tobytes() for image in own.images] == [image.tobytes() for image in other.images]


def test_check_parts_names_the_part() -> None:
    image = {"type": "image", "image": "one.png"}
    check_parts(with_parts(TEXT, image), "here")
    wrong: Any
    for wrong in ({"type": "video"}, {"type": "text"}, {"text": "a"}, "text", {"type": "image_url", "image_url": "a"}):
        with (
            case(str(wrong)),
            pytest.raises(RowError, match=r"here, column 'prompt': message 0, part 1: expected \{type: text, text: "),
        ):
            check_parts(with_parts(TEXT, wrong), "here")
    images: Any
    for images in (None, []):
        with pytest.raises(RowError, match="1 parts have the type image, and the row has no image"):
            check_parts(with_parts(TEXT, {"type": "image"}, images=images), "here")
    with pytest.raises(RowError, match="the prompt is empty"):
        load_rows([with_parts({"type": "text", "text": " "})])


def test_rows_with_videos_are_refused() -> None:
    load_rows([{**row("a"), "videos": []}, {**row("b"), "videos": None}])
    message = "list, row 1, column 'videos': the row has videos, .*remove the row, or write frames of the videos into"
    with pytest.raises(RowError, match=message):
        load_rows([row("a"), {**row("<video>b"), "videos": ["clip.mp4"]}])
