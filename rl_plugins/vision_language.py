"""Vision-language models of transformers: their class, and images as arguments of a forward pass.

The arguments of a pass, with or without images, are made on the host and copied to the device of the model.

Axes: `B` samples, `S` prompt and response with padding, `M` tokens of a packed row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from rl_plugins.device_copies import to_device
from rl_plugins.errors import ConfigError
from rl_plugins.model_json import read_model_config, reads_images

Model = TypeVar("Model", bound=nn.Module)
BlankImage = tuple[list[int], Mapping[str, Tensor]]
"""Tokens of a blank image, and its inputs by the name of the argument."""
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names of the argument that marks the tokens of images, by family."""
_SHARE_FEATURES = frozenset({"gemma3", "idefics3", "llava", "qwen2_5_vl", "qwen3_vl", "smolvlm"})
"""Families in which samples share the features of an image: of the result of `get_image_features`, the model reads
`pooler_output`, which has one feature for each token of an image, and `deepstack_features` of the same form for some of
its layers."""


def model_class(folder: str) -> Any:
    """Return transformers' class for the model in a folder: causal language models, or vision-language models."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = Path(folder) / "config.json"
    has_vision = config.is_file() and reads_images(read_model_config(config))
    return AutoModelForImageTextToText if has_vision else AutoModelForCausalLM


def is_vision_language(model: Callable[..., Any]) -> bool:
    """Return True for a vision-language model, also inside a model engine."""
    return hasattr(getattr(_inner(model), "config", None), "vision_config")


def language_model(model: Callable[..., Any]) -> str:
    """Return the name of the part of a vision-language model that reads tokens, such as `model.language_model`."""
    inner = _inner(model)
    decoder = inner.get_decoder()
    return next(name for name, module in inner.named_modules() if module is decoder)


def vision_tower(model: Callable[..., Any]) -> nn.Module:
    """Return the part of a vision-language model that reads images.

    Raises:
        ConfigError: the model has no such part.
    """
    if not is_vision_language(model):
        raise ConfigError(f"vision_lr: {type(_inner(model)).__name__} has no vision tower: leave vision_lr out")
    tower: nn.Module = _inner(model).get_encoder(modality="image")
    return tower


def with_frozen_tower(model: Model, vision_lr: float | None) -> Model:
    """Return the model, with a frozen vision tower if the learning rate of the tower is 0.

    Raises:
        ConfigError: the rate is 0, and the model has no vision tower.
    """
    if vision_lr == 0:
        vision_tower(model).requires_grad_(False)
    return model


def patch_size(model: Callable[..., Any]) -> int:
    """Return the width and height of a patch of an image in pixels.

    Raises:
        ConfigError: the model has no vision tower, or a vision tower without patches of a fixed size.
    """
    inner, fault = _inner(model), "has no vision tower"
    if is_vision_language(model):
        size: Any = getattr(inner.config.vision_config, "patch_size", None)
        fault = "" if size else "has a vision tower without patches of a fixed size"
    if fault:
        raise ConfigError(f"patches_per_micro_batch: {type(inner).__name__} {fault}: leave patches_per_micro_batch out")
    return int(size) if isinstance(size, int) else int(size[0])


def has_grid_positions(model: Callable[..., Any]) -> bool:
    """Return True if the tokens of images have positions in time, height and width, as in the models of Qwen."""
    return hasattr(getattr(_inner(model), "model", None), "get_rope_index")


def _inner(model: Callable[..., Any]) -> Any:
    """Return the model without its model engine and its adapter."""
    inner: Any = getattr(model, "module", model)
    get_base_model = getattr(inner, "get_base_model", None)
    return inner if get_base_model is None else get_base_model()


@dataclass(frozen=True)
class SampleImages:
    """Images of some samples.

    Attributes:
        model: vision-language model, without model engine and adapter.
        inputs_B: inputs of the images of each sample; None for a sample without images. Samples with one object have
            the same images.
        input_ids_BS: ids of prompts and responses.
    """

    model: Any
    inputs_B: Sequence[Mapping[str, Tensor] | None]
    input_ids_BS: Tensor

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        image_inputs_B: Sequence[Mapping[str, Tensor] | None] | None,
        input_ids_BS: Tensor,
    ) -> SampleImages | None:
        """Return the images of samples; None if no sample has an image.

        Args:
            model: model, or a model engine around the model.
            image_inputs_B: inputs of the images of each sample; None if no sample has images.
            input_ids_BS: ids of prompts and responses.

        Raises:
            ConfigError: a sample has an image, and the model reads text alone.
        """
        if image_inputs_B is None or not any(image_inputs_B):
            return None
        if not is_vision_language(model):
            raise ConfigError(
                f"the samples have images, and {type(_inner(model)).__name__} reads text alone: start all models from "
                "vision-language models with the same tokens"
            )
        return cls(_inner(model), image_inputs_B, input_ids_BS)

    def positions(self, attention_mask_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
        """Return the positions of tokens: [B, S], or [4, B, S] for a model with positions in time, height and width.

        The first of the four are the positions in the text.

        Args:
            attention_mask_BS: 1 at real tokens, 0 at padding.
            position_ids_BS: positions in the text.
        """
        if not has_grid_positions(self.model):
            return position_ids_BS
        places_3BS, _ = self.model.model.get_rope_index(
            self.input_ids_BS,
            self._is_image(self.input_ids_BS),
            image_grid_thw=torch.cat([inputs["image_grid_thw"] for inputs in self.inputs_B if inputs]).to(
                self.input_ids_BS.device
            ),
            attention_mask=attention_mask_BS,
        )
        return torch.cat([position_ids_BS[None], places_3BS])

    def of_samples(self, indices: Tensor) -> SampleImages:
        """Return the images of some samples, in the order of the indices."""
        return SampleImages(
            self.model, [self.inputs_B[index] for index in indices.tolist()], self.input_ids_BS[indices]
        )

    def arguments(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return further arguments of a forward pass over the samples with `input_ids`, [B, S] or [1, M].

        The forward of the model runs its vision tower on these arguments, which have images of several samples once.
        The forward must run inside `shared_features`.
        """
        seen = [inputs for index in self._places.seen if (inputs := self.inputs_B[index])]
        # Idefics has an axis of samples before the axis of images.
        axis = 1 if "pixel_attention_mask" in seen[0] else 0
        joined = {name: _joined([inputs[name] for inputs in seen], axis) for name in seen[0]}
        names = inspect.signature(self.model.base_model.forward).parameters
        types = {name: self._is_image(input_ids) for name in _TOKEN_TYPES if name in names}
        return {**{name: to_device(values, input_ids.device) for name, values in joined.items()}, **types}

    @contextmanager
    def shared_features(self) -> Iterator[None]:
        """Give all samples with the same images the features of these images, in a forward pass inside the block.

        The vision tower runs once in the pass, also in a pass without shared images, so the passes of all ranks have
        the same collectives. In backward, the gradients of all samples add up at the features.
        """
        places, base = self._places, self.model.base_model
        if len(places.seen) == len(places.of_samples):
            yield
            return
        features, tokens = base.get_image_features, self._is_image(self.input_ids_BS[places.seen]).sum(dim=1).tolist()

        def get_image_features(*arguments: Any, **options: Any) -> Any:
            found = features(*arguments, **options)
            found.pooler_output = _repeated(found.pooler_output, tokens, places.of_samples)
            if further := getattr(found, "deepstack_features", None):
                found.deepstack_features = [_repeated(of_layer, tokens, places.of_samples) for of_layer in further]
            return found

        base.__dict__["get_image_features"] = get_image_features
        try:
            yield
        finally:
            del base.__dict__["get_image_features"]

    @cached_property
    def _places(self) -> _ImagePlaces:
        with_images = [index for index, inputs in enumerate(self.inputs_B) if inputs]
        if self.model.config.model_type not in _SHARE_FEATURES:
            return _ImagePlaces(with_images, list(range(len(with_images))))
        first: dict[int, int] = {}
        for index in with_images:
            first.setdefault(id(self.inputs_B[index]), index)
        numbers = {images: number for number, images in enumerate(first)}
        return _ImagePlaces(list(first.values()), [numbers[id(self.inputs_B[index])] for index in with_images])

    def _is_image(self, input_ids: Tensor) -> Tensor:
        return (input_ids == self.model.config.image_token_id).int()


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Join inputs of images along an axis, with zeros up to the largest size of each other axis.

    A processor gives the images of one prompt the size of the largest of them. Models cut images at `image_sizes`.
    """
    sizes = [max(part.shape[number] for part in parts) for number in range(parts[0].ndim)]
    padded = []
    for part in parts:
        missing = [0 if number == axis else size - part.shape[number] for number, size in enumerate(sizes)]
        # torch names the last axis first, and copies also without padding.
        widths = [width for size in reversed(missing) for width in (0, size)]
        padded.append(nn.functional.pad(part, widths) if any(widths) else part)
    return torch.cat(padded, axis)


class _ImagePlaces(NamedTuple):
    """Images that the vision tower sees.

    Attributes:
        seen: indices of the samples with these images, each image once.
        of_samples: for each sample with images, the place of its images among `seen`.
    """

    seen: list[int]
    of_samples: list[int]


def _repeated(features: Tensor | Sequence[Tensor], tokens: list[int], places: list[int]) -> Tensor | list[Tensor]:
    """Return features of images once for each sample, in the form of the given features.

    Args:
        features: features [images, tokens of an image, H], or a sequence of features of each image.
        tokens: number of tokens of each of the different images of samples.
        places: place of the images of each sample among the different images.
    """
    together = features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(list(features))
    parts = together.split(tokens)
    repeated = [parts[place] for place in places]
    return torch.cat(repeated).unflatten(0, (-1, features.shape[1])) if isinstance(features, Tensor) else repeated


@dataclass(frozen=True)
class ModelInputs:
    """Arguments of a forward pass.

    Attributes:
        arguments: arguments by name.
        images: images of the samples; None if no sample has images.
    """

    arguments: dict[str, Any]
    images: SampleImages | None = None

    @classmethod
    def of(cls, tokens: Mapping[str, Any], images: SampleImages | None) -> ModelInputs:
        """Return arguments for tokens, together with the arguments for images."""
        return cls({**tokens, **({} if images is None else images.arguments(tokens["input_ids"]))}, images)

    def run(self, model: Callable[..., Any], **options: Any) -> Any:
        """Run a model; `options` are further arguments. The vision tower sees images of several samples once."""
        with nullcontext() if self.images is None else self.images.shared_features():
            return model(**self.arguments, **options)


def padded_inputs(
    model: Callable[..., Any],
    *,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    position_ids_BS: Tensor,
    image_inputs_B: Sequence[Mapping[str, Tensor] | None] | None = None,
    device: torch.device | None = None,
) -> ModelInputs:
    """Return the arguments of a forward pass over padded samples.

    Args:
        model: model, or a model engine around the model.
        input_ids_BS: ids of prompts and responses.
        attention_mask_BS: 1 at real tokens, 0 at padding.
        position_ids_BS: positions in the text.
        image_inputs_B: inputs of the images of each sample; None if no sample has images.
        device: device of the model, by default the device of the samples.

    Raises:
        ConfigError: a sample has an image, and the model reads text alone.
    """
    images = SampleImages.of(model, image_inputs_B, input_ids_BS)
    if images is not None:
        position_ids_BS = images.positions(attention_mask_BS, position_ids_BS)
    tokens = {"input_ids": input_ids_BS, "attention_mask": attention_mask_BS, "position_ids": position_ids_BS}
    device = device or input_ids_BS.device
    return ModelInputs.of({name: to_device(values, device) for name, values in tokens.items()}, images)


def with_blank_image(
    blank: BlankImage,
    *,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    position_ids_BS: Tensor,
    response_width: int,
    image_inputs_B: Sequence[Mapping[str, Tensor] | None] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a forward pass with one more sample, which is a prompt with a blank image alone.

    In a sharded model, all ranks take part in each pass of the vision tower, also a rank without images.

    Args:
        blank: tokens and inputs of a blank image.
        input_ids_BS: ids of prompts and responses.
        attention_mask_BS: 1 at real tokens, 0 at padding.
        position_ids_BS: positions in the text.
        response_width: number of response columns.
        image_inputs_B: inputs of the images of each sample; None if no sample has images.
    """
    ids, image = blank
    places = torch.arange(len(ids), device=input_ids_BS.device)
    prompt_width = max(len(ids), input_ids_BS.shape[1] - response_width)
    around = (prompt_width - len(ids), response_width)

    def with_row(samples_BS: Tensor, row: Tensor) -> Tensor:
        missing = prompt_width + response_width - samples_BS.shape[1]
        own = nn.functional.pad(row, around).to(samples_BS)
        return torch.cat([nn.functional.pad(samples_BS, (missing, 0)), own[None]])

    return {
        "input_ids_BS": with_row(input_ids_BS, torch.tensor(ids, device=places.device)),
        "attention_mask_BS": with_row(attention_mask_BS, torch.ones_like(places)),
        "position_ids_BS": with_row(position_ids_BS, places),
        "response_width": response_width,
        "image_inputs_B": [*(image_inputs_B or [None] * len(input_ids_BS)), image],
    }
