"""Prompts with images: the tokens of transformers' processors, and rows that are refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tiny_vision import processor, save_tiny_vision
from rl_plugins.data.chat_template import template_of_processor
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.image_prompts import (
    ImagePromptEncoder,
    ImagesOfRows,
    load_processor,
    load_tokenizer_or_processor,
    tokenizer_of,
)
from rl_plugins.data.images import IMAGE_FAULT, IMAGE_INPUTS, PROMPT_IMAGES
from rl_plugins.data.parquet import load_rows
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.errors import ConfigError, RowError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.pictures import encoded, picture, row

FAMILIES = ("llava", "gemma3", "qwen2_5_vl", "qwen3_vl", "idefics3")


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_ids_and_inputs_equal_the_results_of_the_processor(family: str) -> None:
    made, images = processor(family), [picture(1, (24, 48)), picture(2)]
    rows = load_rows([row("<image>one, <image>two", *images), row("no picture")])
    content = [{"type": "image"}, {"type": "text", "text": "one, "}, {"type": "image"}, {"type": "text", "text": "two"}]
    text = made.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    expected = made(images=images, text=[text], return_tensors="pt", add_special_tokens=False)
    prompts = ImagePromptEncoder(made)
    ids = prompts.prompt_ids(rows, {})
    assert ids[0] == expected["input_ids"][0].tolist()
    assert ids[1] == made.tokenizer.encode("<|user|>no picture<|assistant|>")
    found, nothing = ImagesOfRows(rows, prompts, {})[:]
    assert nothing is None and found is not None and "input_ids" not in found.inputs
    for name, value in found.inputs.items():
        assert torch.equal(value, expected[name]), name
    assert found.placeholder_ids == made.tokenizer.encode(text) and found.num_tokens == len(ids[0])
    assert found.with_placeholders([*ids[0], 5, 6]) == [*found.placeholder_ids, 5, 6]
    assert not found.without_inputs().inputs and len(found.images) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_in_a_text_beside_an_image_are_plain_text(family: str) -> None:
    prompts = ImagePromptEncoder(processor(family))
    # LLaVA's token of an image is the place of an image in a text, too.
    token = processor(family).image_token.replace("<image>", "")
    ids, found = prompts.encode([{"role": "user", "content": f"<image>{token}<|end|>"}], [picture()], {})
    alone, expected = prompts.encode([{"role": "user", "content": "<image>"}], [picture()], {})
    for special in (*prompts.image_token_ids, prompts.tokenizer.eos_token_id):
        assert ids.count(special) == alone.count(special)
    assert found is not None and expected is not None
    assert all(torch.equal(found.inputs[name], value) for name, value in expected.inputs.items())
    plain, nothing = prompts.encode([{"role": "user", "content": "<image>"}], [], {})
    assert not nothing and not set(prompts.image_token_ids) & set(plain)


def test_batches_have_the_inputs_of_images_and_no_files() -> None:
    rows = [row("<image>a", picture(1)), row("b"), row("<image>c", picture(2)), row("d")]
    prompts = PromptDataModule(rows, tokenizer=processor("llava"), prompts_per_step=4)
    prompts.setup("fit")
    (batch,) = prompts.train_dataloader()
    assert "images" not in batch.columns
    present = {
        number: images is not None for number, images in zip(batch.rows, batch.columns[PROMPT_IMAGES], strict=True)
    }
    assert present == {0: True, 1: False, 2: True, 3: False}
    responses = SFTDataModule(rows, tokenizer=processor("llava"), prompts_per_step=4)
    responses.setup("fit")
    (given,) = responses.train_dataloader()
    assert sum(inputs is not None for inputs in given[IMAGE_INPUTS]) == 2


def test_state_of_prompts_with_images_is_plain_data() -> None:
    data = PromptDataModule([row("<image>a", picture(1)), row("b")], tokenizer=processor("llava"), prompts_per_step=2)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    file = io.BytesIO()
    torch.save(batch.state(), file)
    file.seek(0)
    again = PromptBatch.from_state(torch.load(file, weights_only=True))
    assert again.prompt_ids == batch.prompt_ids and again.rows == batch.rows
    for own, other in zip(batch.columns[PROMPT_IMAGES], again.columns[PROMPT_IMAGES], strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            assert all(torch.equal(other.inputs[name], value) for name, value in own.inputs.items())
            assert [image.tobytes() for image in other.images] == [image.tobytes() for image in own.images]
            assert other.placeholder_ids == own.placeholder_ids and other.num_tokens == own.num_tokens


def test_batches_of_rows_without_images_have_no_inputs() -> None:
    data = PromptDataModule([row("a"), row("b")], tokenizer=processor("llava"), prompts_per_step=2)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert PROMPT_IMAGES not in batch.columns


def test_blank_image_is_not_cut_into_tiles() -> None:
    made = processor("idefics3")
    whole_ids, whole = ImagePromptEncoder(made).encode_blank(picture())
    made.image_processor.do_image_splitting = True
    ids, inputs = ImagePromptEncoder(made).encode_blank(picture())
    assert ids == whole_ids and inputs["pixel_values"].shape == whole["pixel_values"].shape


def test_responses_with_the_token_of_an_image_are_refused() -> None:
    rows = [row("<image>a", picture(), answer="see <image>")]
    data = SFTDataModule(rows, tokenizer=processor("llava"), prompts_per_step=1)
    with pytest.raises(RowError, match="row 0, response: it has the token <image>, the place of an image"):
        data.setup("fit")


def test_images_that_the_processor_refuses_name_the_row() -> None:
    made: Any = processor("qwen2_5_vl")
    rows = load_rows([row("a"), row("<image>b", picture(size=(2000, 2)))])
    with pytest.raises(RowError, match=r"row 1, column 'images': ImagesAlone refuses the value: .*aspect ratio"):
        list(ImagePromptEncoder(made).prompt_ids(rows, {}))


def test_bad_images_filter_counts_the_rows_that_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row("<image>a", picture()), row("<image>b", b"text"), row("<image>c"), row("<image>", picture(), picture())]
    data = PromptDataModule(rows, rows[:1], tokenizer=processor("llava"), prompts_per_step=1, bad_images="filter")
    with caplog.at_level("INFO"):
        data.setup("fit")
    # Without an image, `<image>` is text.
    assert data.sources["train"].kept.tolist() == [0, 2] and data.dropped_images == {"train": 2, "validation": 0}
    assert "train: 2 prompts, 0 dropped as too long" in caplog.text
    assert "train: 2 dropped for bad images, such as list, row 1, column 'images': image 0 is no" in caplog.text
    assert "validation: 1 prompts, 0 dropped" in caplog.text and caplog.text.count("dropped for bad images") == 1
    responses = SFTDataModule(rows, tokenizer=processor("llava"), prompts_per_step=1, bad_images="filter")
    responses.setup("fit")
    assert responses.sources["train"].kept.tolist() == [0, 2]
    nothing = PromptDataModule(rows[1:2], tokenizer=processor("llava"), prompts_per_step=1, bad_images="filter")
    with pytest.raises(ConfigError, match="every row has a bad image, such as list, row 0"):
        nothing.setup("fit")
    unknown: Any = "skip"
    with pytest.raises(ConfigError, match="bad_images='skip': choose 'filter' or 'error'"):
        PromptDataModule(rows, tokenizer=processor("llava"), prompts_per_step=1, bad_images=unknown)


def test_rows_left_out_as_too_long_and_for_bad_images_are_counted_apart() -> None:
    rows = [row("a"), row("long " * 100), row("<image>b", b"text")]
    data = PromptDataModule(
        rows, tokenizer=processor("llava"), prompts_per_step=1, max_prompt_tokens=64, bad_images="filter"
    )
    data.setup("fit")
    assert data.sources["train"].kept.tolist() == [0]
    assert (data.dropped_prompts, data.dropped_images) == ({"train": 1}, {"train": 1})


def test_a_row_whose_image_was_removed_is_left_out_or_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, made = tmp_path / "one.png", processor("llava")
    rows = [row("<image>a", str(file)), row("b"), row("<image>c", picture(2))]

    def source(module: Any, bad_images: Any) -> Any:
        file.write_bytes(encoded(picture(1)))
        data = module(rows, tokenizer=made, prompts_per_step=1, bad_images=bad_images)
        data.setup("fit")
        file.unlink()
        return data.sources["train"]

    for module in (PromptDataModule, SFTDataModule):
        with pytest.raises(RowError, match=r"row 0, column 'images': image 0 cannot be read \(.*one\.png"):
            source(module, "error").batch([0], 0)
    prompts = source(PromptDataModule, "filter").batch([0, 2], 0)
    text, _ = ImagePromptEncoder(made).encode([{"role": "user", "content": "<image>a"}], [], {})
    assert prompts.rows == [0, 2] and prompts.prompt_ids[0] == text
    assert [images is not None for images in prompts.columns[PROMPT_IMAGES]] == [False, True]
    fault, nothing = prompts.columns[IMAGE_FAULT]
    assert "one.png" in fault and nothing is None
    # The next row takes the place of a row with a given response.
    served = source(SFTDataModule, "filter")
    given = [served.batch([index], 0)["prompt_ids"] for index in (0, 0, 1, 2)]
    assert given[0] == given[1] == given[2] != given[3]
    assert served.batch([2, 0], 0)[IMAGE_INPUTS][1] is None
    assert caplog.text.count("left out since the start of the run: list, row 0, column 'images'") == 2


def test_load_tokenizer_or_processor_follows_the_model(tmp_path: Path) -> None:
    save_tiny_vision("gemma3", tmp_path / "gemma3")
    save_tiny_policy(tmp_path / "text", hidden_size=32, intermediate_size=48)
    assert type(load_tokenizer_or_processor(str(tmp_path / "gemma3"))).__name__ == "Gemma3Processor"
    assert not hasattr(load_tokenizer_or_processor(str(tmp_path / "text")), "image_processor")
    with pytest.raises(ConfigError, match=r"text: there is no processor of images"):
        load_processor(str(tmp_path / "text"))


def test_load_tokenizer_or_processor_saves_the_given_chat_template(tmp_path: Path) -> None:
    save_tiny_vision("gemma3", tmp_path / "gemma3")
    processor: Any = load_tokenizer_or_processor(str(tmp_path / "gemma3"), chat_template="{{ messages }}")
    processor.save_pretrained(tmp_path / "exported")
    again: Any = load_tokenizer_or_processor(str(tmp_path / "exported"))
    assert again.chat_template == tokenizer_of(again).chat_template == "{{ messages }}"


def test_load_processor_and_tokenizer_share_the_only_chat_template(tmp_path: Path) -> None:
    save_tiny_vision("gemma3", tmp_path)
    file = tmp_path / "chat_template.jinja"
    template = file.read_text()
    file.unlink()
    assert template_of_processor(tmp_path) is None
    for name in ("chat_template.json", "tokenizer_config.json"):
        target = tmp_path / name
        before = target.read_text() if target.is_file() else None
        content = {**json.loads(before or "{}"), "chat_template": template}
        target.write_text(json.dumps(content))
        found = load_processor(str(tmp_path))
        assert found.chat_template == tokenizer_of(found).chat_template == template
        assert template_of_processor(tmp_path) == (template if before is None else None)
        target.unlink() if before is None else target.write_text(before)


def test_load_processor_names_the_missing_package(tmp_path: Path) -> None:
    save_tiny_vision("qwen2_5_vl", tmp_path)
    with pytest.raises(ConfigError, match="needs a package that is not installed, such as torchvision"):
        load_processor(str(tmp_path))
