"""Prompts with images: token ids with the tokens of all images, and the inputs of the model for the images.

The processor of a vision-language model replaces the placeholder of an image by as many tokens as the model makes of
the image. The data modules keep the token ids, which the trainer and the rollout engine share. Images and their inputs
are made again at each access.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from rl_plugins.data.chat_template import TemplateCheck, TemplateRefusal, refused_messages, render
from rl_plugins.data.images import (
    COLUMN,
    IMAGES,
    PLACEHOLDER,
    ImageInputs,
    PromptImages,
    check_places,
    has_images,
    in_parts,
    read_images,
)
from rl_plugins.data.on_disk import MappedLists
from rl_plugins.data.parquet import LocatedRow, PromptRows
from rl_plugins.data.sequence_with_slices import SequenceWithSlices
from rl_plugins.data.tokenization import FilterOrError, PlainTexts, completed, load_tokenizer
from rl_plugins.errors import ConfigError, RowError
from rl_plugins.hub.files import model_folder
from rl_plugins.model_json import read_model_config, reads_images

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)

Processor: TypeAlias = "PreTrainedTokenizerBase | ProcessorMixin"
"""Tokenizer of a language model, or processor of a vision-language model."""
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
"""Results of a processor for the text."""
_BLANK = 32
"""Width and height of a blank image."""


def load_processor(path: str, *, trust_remote_code: bool = False) -> ProcessorMixin:
    """Load the processor of a vision-language model.

    Args:
        path: folder or hub name.
        trust_remote_code: run Python code that the folder's configuration names, with all rights of the user.

    Raises:
        ConfigError: the processor cannot be loaded, or the tokenizer has no end-of-sequence token.
    """
    from transformers import AutoProcessor

    folder = model_folder(path, weights=False, trust_remote_code=trust_remote_code)
    try:
        processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise ConfigError(
            f"{path}: the processor needs a package that is not installed, such as torchvision for families with "
            f"videos: {' '.join(str(error).split())[:200]}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the processor cannot be loaded: {' '.join(str(error).split())[:200]}") from None
    if not has_image_processor(processor):
        raise ConfigError(f"{path}: there is no processor of images in the folder: save the model's processor there")
    processor.tokenizer = completed(processor.tokenizer, path)
    # Published folders have the template in the files of the processor, in those of the tokenizer, or in both.
    owners = (processor, processor.tokenizer)
    for owner, other in (owners, reversed(owners)):
        owner.chat_template = owner.chat_template or other.chat_template
    return processor


def load_tokenizer_or_processor(
    path: str, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> Processor:
    """Load the processor of a vision-language model, or the tokenizer of another model.

    Args:
        path: folder or hub name.
        trust_remote_code: run Python code that the folder's configuration names, with all rights of the user.
        chat_template: Jinja template in place of the template in the folder; None keeps the template.

    Raises:
        ConfigError: see `load_processor` and `load_tokenizer`.
    """
    folder = Path(model_folder(path, weights=False, trust_remote_code=trust_remote_code))
    config = folder / "config.json"
    load = load_processor if config.is_file() and reads_images(read_model_config(config)) else load_tokenizer
    processor = load(path, trust_remote_code=trust_remote_code)
    if chat_template is not None:
        # A processor and its tokenizer save a template each.
        for owner in (processor, tokenizer_of(processor)):
            owner.chat_template = chat_template
    return processor


def has_image_processor(processor: object) -> TypeGuard[ProcessorMixin]:
    """Return True for a processor with a processor of images, False for a tokenizer."""
    return getattr(processor, "image_processor", None) is not None


def tokenizer_of(processor: Processor) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor; a tokenizer is returned unchanged."""
    found: Any = processor
    tokenizer: PreTrainedTokenizerBase = found.tokenizer if has_image_processor(processor) else found
    return tokenizer


def blank_image(processor: Processor) -> tuple[list[int], ImageInputs] | None:
    """Return tokens and inputs of a blank image, made by a processor; None for a tokenizer."""
    if not has_image_processor(processor):
        return None
    from PIL import Image

    return ImagePromptEncoder(processor).encode_blank(Image.new("RGB", (_BLANK, _BLANK)))


class ImagePromptEncoder:
    """Makes token ids and inputs of images.

    Args:
        processor: processor of a vision-language model, with a chat template.
        bad_images: "filter" leaves out rows with bad images, "error" refuses them.

    Attributes:
        dropped: reason for each row that was left out.

    Raises:
        ConfigError: the processor has no placeholder for an image.
    """

    def __init__(self, processor: ProcessorMixin, bad_images: FilterOrError = "error") -> None:
        self._processor: Any = processor
        self._bad_images, self.dropped = bad_images, list[str]()
        self.tokenizer: PreTrainedTokenizerBase = self._processor.tokenizer
        self._texts = PlainTexts(self.tokenizer)
        if getattr(processor, "image_token", None) is None:
            raise ConfigError(
                f"{type(processor).__name__} of transformers has no image_token: rows with images need a model whose "
                "processor has a placeholder for an image, such as Qwen2.5-VL, Gemma 3 or LLaVA"
            )

    @property
    def image_token_ids(self) -> list[int]:
        """Ids of the tokens in the place of an image, which the model replaces."""
        ids: list[int] = self._processor.image_token_ids
        return ids

    def prompt_ids(self, rows: PromptRows, template_options: Mapping[str, Any]) -> MappedLists:
        """Return the token ids of all rows' prompts on disk; none for a row that is left out. Each image is read.

        Raises:
            RowError: see `accepted_rows` and `encode_row`.
        """
        return MappedLists(self.encode_row(row, template_options) for row in self.accepted_rows(rows, template_options))

    def accepted_rows(self, rows: PromptRows, template_options: Mapping[str, Any]) -> Iterator[LocatedRow]:
        """Yield each row. No image is read.

        Raises:
            RowError: the chat template refuses a row's sequence of roles, or the number of images is wrong.
        """
        check = TemplateCheck(self.tokenizer, template_options)
        for number, columns in enumerate(rows):
            row, with_images = rows.located(number, columns), has_images(columns)
            if with_images and self._bad_images == "error":
                check_places(row)
            if reason := check.refusal(in_parts(columns["prompt"], images=with_images)):
                raise RowError(row.location, "column 'prompt'", reason)
            yield row

    def encode_row(self, row: LocatedRow, template_options: Mapping[str, Any]) -> list[int]:
        """Return the token ids of the prompt of a row; none for a row that is left out.

        Args:
            row: the row.
            template_options: further variables of the chat template.

        Raises:
            RowError: the number of images is wrong, an image cannot be read, or the processor refuses an image or the
                messages.
        """
        try:
            return self._encode_row(row, template_options)[0]
        except RowError as error:
            if not self.leaves_out(error):
                raise
            self.dropped.append(str(error))
            return []

    def leaves_out(self, error: RowError) -> bool:
        """Return True if a row with this error is left out, False if the error ends the run."""
        return self._bad_images == "filter" and error.field == COLUMN

    def images_of_row(self, row: LocatedRow, template_options: Mapping[str, Any]) -> PromptImages | None:
        """Return the images of the prompt of a row, None for a row without images.

        Raises:
            RowError: see `encode_row`, also for a row that `encode_row` leaves out.
        """
        return self._encode_row(row, template_options)[1] if has_images(row.columns) else None

    def ids_of_texts(self, row: LocatedRow, template_options: Mapping[str, Any]) -> list[int]:
        """Return the token ids of the prompt of a row, with `<image>` as text in the place of each image."""
        return self._encode_row(row, template_options, with_images=False)[0]

    def _encode_row(
        self, row: LocatedRow, template_options: Mapping[str, Any], *, with_images: bool = True
    ) -> tuple[list[int], PromptImages | None]:
        images = []
        if with_images and has_images(row.columns):
            check_places(row)
            images = read_images(row)
        try:
            return self.encode(row.columns["prompt"], images, template_options)
        except TemplateRefusal as error:
            reason = refused_messages(self.tokenizer, row.columns["prompt"], error)
            raise RowError(row.location, "column 'prompt'", reason) from None
        except ValueError as error:
            column = IMAGES if images else "prompt"
            reason = f"{type(self._processor).__name__} refuses the value: {error}"
            raise RowError(row.location, f"column {column!r}", reason) from None

    def check_responses(self, rows: PromptRows, response_ids: Sequence[Sequence[int]]) -> None:
        """Check that no response has the token of an image.

        Raises:
            RowError: a response has such a token.
        """
        for number, response in enumerate(response_ids):
            self.check_response(rows.location(number), response)

    def check_response(self, location: str, response: Sequence[int]) -> None:
        """Raise a RowError if a response has the token of an image."""
        if found := set(self.image_token_ids) & set(response):
            token = self.tokenizer.convert_ids_to_tokens(min(found))
            raise RowError(location, "response", f"it has the token {token}, the place of an image: remove it")

    def encode(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Image], template_options: Mapping[str, Any]
    ) -> tuple[list[int], PromptImages | None]:
        """Return the token ids of a prompt, and its images; None without images.

        Special tokens in the messages are plain text (see `PlainTexts`).

        Raises:
            ValueError: the processor or its chat template refuses the messages or the images.
        """
        hidden = self._texts.hide([dict(message) for message in messages])
        # The placeholder may itself be a special token of the tokenizer.
        placeholder = self._texts.hide(PLACEHOLDER)
        for message in hidden if images else ():
            message["content"] = message["content"].replace(placeholder, PLACEHOLDER)
        conversation = in_parts(hidden, images=bool(images))
        text = render(self._processor, conversation, template_options)
        placeholder_ids = self._texts.encode(text)
        if not images:
            return placeholder_ids, None
        ids, inputs = self._encode(text, images)
        return ids, PromptImages(inputs, images, placeholder_ids, len(ids))

    def encode_blank(self, image: Image) -> tuple[list[int], ImageInputs]:
        """Return the tokens and the inputs of an image without a prompt, in one piece."""
        # A processor that cuts images would enlarge the image and cut it into tiles.
        is_cut = getattr(self._processor.image_processor, "do_image_splitting", False)
        return self._encode(self._processor.image_token, [image], **({"do_image_splitting": False} if is_cut else {}))

    def _encode(self, text: str, images: Sequence[Image], **options: Any) -> tuple[list[int], ImageInputs]:
        """Return the tokens of a text with the tokens of each image in the place of its placeholder, and the inputs."""
        result = self._processor(
            images=list(images),
            text=[text],
            return_tensors="pt",
            add_special_tokens=False,
            return_text_replacement_offsets=True,
            **options,
        )
        if "text_replacement_offsets" not in result:
            raise ConfigError(
                f"{type(self._processor).__name__} does not say where it puts the tokens of images: use a processor of "
                "transformers"
            )
        parts, end = [], 0
        for found in result["text_replacement_offsets"][0]:
            start, stop = found["span"]
            parts += [text[end:start], found["replacement"]]
            end = stop
        inputs = {name: value for name, value in result.items() if name not in _OF_TEXT}
        return self._texts.encode("".join([*parts, text[end:]])), inputs


class ImagesOfRows(SequenceWithSlices[PromptImages | None]):
    """Images of each row, read at each access; None for a row without images.

    A file may be damaged or removed after the start. If rows with bad images are left out, the first failed access to a
    row is logged.

    Args:
        rows: the rows.
        prompts: maker of the inputs.
        template_options: further variables of the chat template.

    Attributes:
        prompts: maker of the inputs.
    """

    def __init__(self, rows: PromptRows, prompts: ImagePromptEncoder, template_options: Mapping[str, Any]) -> None:
        self._rows, self.prompts, self._template_options = rows, prompts, template_options
        self._logged = set[int]()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def item(self, number: int) -> PromptImages | None:
        """Return the images of a row."""
        return self.prompts.images_of_row(self._rows.located(number), self._template_options)

    def prompt(self, number: int, prompt_ids: list[int]) -> tuple[list[int], PromptImages | None, str | None]:
        """Return token ids and images of the prompt of a row, and None; or a prompt of text alone, and the fault.

        Args:
            number: number of the row.
            prompt_ids: token ids of the prompt with the tokens of the images.

        Raises:
            RowError: an image is bad, and rows with bad images are not left out.
        """
        try:
            return prompt_ids, self[number], None
        except RowError as error:
            self._check_left_out(number, error)
            # The prompt of text is for a sample without a score. Tokens of images would need the images.
            return self.prompts.ids_of_texts(self._rows.located(number), self._template_options), None, str(error)

    def first_read(self, numbers: Sequence[int]) -> tuple[int, PromptImages | None]:
        """Return the first of some rows without a bad image, and the images of this row.

        Args:
            numbers: numbers of the rows, at least one.

        Raises:
            RowError: all rows have a bad image, or rows with bad images are not left out.
        """
        for number in numbers[:-1]:
            try:
                return number, self[number]
            except RowError as error:
                self._check_left_out(number, error)
        return numbers[-1], self[numbers[-1]]

    def _check_left_out(self, number: int, error: RowError) -> None:
        if not self.prompts.leaves_out(error):
            raise error
        if number not in self._logged:
            self._logged.add(number)
            logger.warning("left out since the start of the run: %s", error)
