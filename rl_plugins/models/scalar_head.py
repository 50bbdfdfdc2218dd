"""Models with a scalar head: critics and reward models. The body of a causal or vision-language model has a linear head
with one output.

The number at a position depends on the tokens up to the position. For a critic, the number is the value of this state.
For a reward model, the number is the score of these tokens. On disk, both are token classification models of
transformers with one label.

Axes: `B` samples, `S` prompt and response (prompts padded on the left, responses on the right), `T` response tokens,
`M` tokens of a packed row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rl_plugins.data.images import ImageInputs
from rl_plugins.device_copies import to_device
from rl_plugins.errors import ConfigError
from rl_plugins.hub.files import model_folder
from rl_plugins.models.folder import check_folder
from rl_plugins.models.loading import LoadingOptions, check_loading, device_map, prepared
from rl_plugins.models.log_probs import replaced_forward
from rl_plugins.models.packing import check_positions, pack
from rl_plugins.models.remote import RemoteModel
from rl_plugins.models.token_distributions import accumulation_dtype
from rl_plugins.vision_language import ModelInputs, padded_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_HEADS: WeakKeyDictionary[nn.Module, list[nn.Linear]] = WeakKeyDictionary()
"""Linear layers of the head of each model so far."""


def load_scalar_head(
    path: str, *, dtype: torch.dtype, new_head: bool = True, **options: Unpack[LoadingOptions]
) -> PreTrainedModel:
    """Load a model with a scalar head, in train mode and without dropout before the head.

    The head is loaded from a reward model (token or sequence classification with one label). On the body of a causal
    or vision-language model, the head is new: weight and bias are 0, so every score is 0.

    Args:
        path: Hugging Face name or folder.
        dtype: data type of the parameters.
        new_head: add a new head to a model without a scalar head. If False, such a model is refused.
        options: see `LoadingOptions`.

    Raises:
        ConfigError: the architecture has no token classification model, the head has several labels, weights of the
            body are missing, a required head is missing, or a weight is NaN or infinite.
    """
    from transformers import AutoModelForTokenClassification

    check_loading(options)
    trust_remote_code = options.get("trust_remote_code", False)
    model: PreTrainedModel
    with _without_load_report():
        model, loaded = AutoModelForTokenClassification.from_pretrained(
            model_folder(path, trust_remote_code=trust_remote_code),
            config=scalar_head_config(path, trust_remote_code=trust_remote_code),
            dtype=dtype,
            device_map=device_map(),
            attn_implementation=options.get("attention"),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    head = {name: p for name, p in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    missing = {name: head.get(name) for name in loaded["missing_keys"]}
    if None in missing.values():
        lost = sorted(name for name, parameter in missing.items() if parameter is None)
        raise ConfigError(f"{path}: {len(lost)} weights of {type(model).__name__} are missing, such as {lost[0]}")
    # A trained head may have no bias.
    is_new = any(name.endswith("weight") for name in missing)
    if is_new and not new_head:
        raise ConfigError(
            f"{path} has no scalar head ({', '.join(sorted(head))}), so all its scores would be 0: name a reward "
            "model, such as one that the recipe reward_modeling has trained"
        )
    if is_new and (unused := sorted(name for name in loaded["unexpected_keys"] if _is_head(name))):
        raise ConfigError(
            f"{path}: the head {unused[0]} does not fit {type(model).__name__}, which needs {min(head)}: name a model "
            "with this head, or a causal language model"
        )
    _zero([parameter for parameter in missing.values() if parameter is not None])
    model.name_or_path = path
    return prepared(model, options)


def scalar_head_config(path: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the configuration of a model with a scalar head.

    Args:
        path: Hugging Face name or folder of a causal language model or of a model with a scalar head.
        trust_remote_code: see `LoadingOptions`.

    Raises:
        ConfigError: the model has several labels, the architecture has no token classification model, or the model
            needs code of its folder, and the code is not trusted.
    """
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig

    folder = model_folder(path, weights=False, trust_remote_code=trust_remote_code)
    check_folder(folder, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    _register_classifier(config)
    architecture = (config.architectures or ["a causal language model"])[0]
    if architecture.endswith("Classification") and config.num_labels != 1:
        raise ConfigError(
            f"{path}: {architecture} has {config.num_labels} labels, and a scalar head has one: name a reward model "
            "with a single output, or a causal language model"
        )
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ConfigError(
            f"{path}: transformers has no token classification model for {config.model_type}, which critics and "
            "reward models need: start them from a model of another family, such as Qwen2 or Llama"
        )
    config.num_labels = 1
    # Two passes over the same tokens must give the same scores.
    config.classifier_dropout = 0.0
    return config


def _register_classifier(config: PreTrainedConfig) -> None:
    """Give transformers a token classification model for a vision-language family without such a model.

    The model is the base model of the family with transformers' own head. Names of weights in files are changed as for
    the family's language model.
    """
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
        AutoModelForTokenClassification,
    )
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_layers import GenericForTokenClassification

    family = type(config)
    has_images = family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and family in MODEL_MAPPING
    if family in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING or not has_images:
        return
    base: Any = MODEL_MAPPING[family]
    generator: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[family]
    name = f"{base.__name__.removesuffix('Model')}ForTokenClassification"
    # The parent of a base model in transformers is the family's class without layers.
    classifier = type(name, (GenericForTokenClassification, base.__base__), {"__module__": __name__})
    conversions = get_checkpoint_conversion_mapping(generator.__name__)
    conversions = conversions or get_checkpoint_conversion_mapping(config.model_type)
    register_checkpoint_conversion_mapping(name, conversions or [])
    # Without `exist_ok`, transformers keeps no class for a configuration of its own.
    AutoModelForTokenClassification.register(family, classifier, exist_ok=True)


@contextmanager
def _without_load_report() -> Iterator[None]:
    # transformers warns about the new head and the unused head of the language model, and both are intended. This is a
    # filter, because with a higher log level transformers prints a report about tensor parallelism instead.
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_an_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_an_error)


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _is_head(name: str) -> bool:
    return name.split(".")[0] in ("score", "classifier", "value_head", "v_head", "reward_head")


def _zero(parameters: list[torch.nn.Parameter]) -> None:
    with torch.no_grad():
        if not any(hasattr(parameter, "ds_id") for parameter in parameters):
            for parameter in parameters:
                parameter.zero_()
            return
        import deepspeed

        # Under ZeRO-3, each rank has a shard. DeepSpeed sends the full parameter of rank 0 to all ranks.
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
            for parameter in parameters:
                parameter.zero_()


def position_scores(
    model: Callable[..., Any],
    *,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    position_ids_BS: Tensor,
    response_width: int | None = None,
    image_inputs_B: Sequence[ImageInputs | None] | None = None,
    packed: bool = False,
    device: torch.device | None = None,
) -> Tensor:
    """Run one forward pass, and return the number at every position [B, S], in float32 or float64.

    Padded positions have finite numbers without meaning. With samples on the host, the host does not wait for a GPU.

    Args:
        model: model with a scalar head, a model engine around such a model, or a `RemoteModel`.
        input_ids_BS: ids of prompts and responses.
        attention_mask_BS: 1 at real tokens, 0 at padding.
        position_ids_BS: positions, counted from 0 at the first real token of a sample.
        response_width: number of response columns, T, needed for shared prompts in a packed row.
        image_inputs_B: inputs of the images of each sample; None if no sample has images.
        packed: run the real tokens of all samples as one row without padding (see `packing`).
        device: device of the model and of the result, by default the device of the samples.

    Raises:
        ConfigError: a sample has images, and the model reads text alone; or see `check_positions`.
    """
    device = device or input_ids_BS.device
    if isinstance(model, RemoteModel):
        scores_BS = model.position_scores(
            input_ids_BS=input_ids_BS,
            attention_mask_BS=attention_mask_BS,
            position_ids_BS=position_ids_BS,
            response_width=response_width,
            image_inputs_B=image_inputs_B,
            packed=packed,
        )
        return to_device(scores_BS, device)
    check_positions(model, position_ids_BS)

    def scores(inputs: ModelInputs) -> Tensor:
        with _head_in_32_bits(model):
            found: Tensor = inputs.run(model, use_cache=False).logits.squeeze(-1)
        return found.to(accumulation_dtype(found.dtype))

    samples: dict[str, Any] = {
        "input_ids_BS": input_ids_BS,
        "attention_mask_BS": attention_mask_BS,
        "position_ids_BS": position_ids_BS,
        "image_inputs_B": image_inputs_B,
        "device": device,
    }
    if not packed:
        return scores(padded_inputs(model, **samples))
    row = pack(model, **samples, response_width=response_width)
    (scores_M,) = scores(row.inputs)
    real_tokens = attention_mask_BS.nonzero(as_tuple=True)
    places_N = to_device(row.places_BS[real_tokens], device)
    scores_BS = scores_M.new_zeros(attention_mask_BS.shape)
    scores_BS[tuple(to_device(index_N, device) for index_N in real_tokens)] = scores_M[places_N]
    return scores_BS


@contextmanager
def _head_in_32_bits(model: Callable[..., Any]) -> Iterator[None]:
    """Compute the products of the scalar head in float32 inside the block. In bfloat16, 20.03 and 20.05 are equal."""
    with ExitStack() as replaced:
        for head in _linear_layers_of_head(model):
            replaced.enter_context(replaced_forward(head, partial(_linear_in_32_bits, head)))
        yield


def _linear_in_32_bits(head: nn.Linear, hidden: Tensor) -> Tensor:
    dtype = accumulation_dtype(hidden.dtype)
    bias = None if head.bias is None else head.bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.to(dtype), head.weight.to(dtype), bias)


def _linear_layers_of_head(model: Callable[..., Any]) -> list[nn.Linear]:
    """Return the linear layers of the head of a model, also inside a model engine and beside an adapter."""
    inner: Any = getattr(model, "module", model)
    if not isinstance(inner, nn.Module):
        return []
    if inner not in _HEADS:
        get_base_model: Any = getattr(inner, "get_base_model", None)
        base = inner if get_base_model is None else get_base_model()
        # FSDP2 gives a layer a class of its own.
        _HEADS[inner] = [
            layer
            for name, layer in base.named_modules()
            if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and _is_head(name)
        ]
    return _HEADS[inner]


def response_values(model: Callable[..., Any], *, response_width: int, **forward: Any) -> Tensor:
    """Return the value of the state before each response token [B, T]: the number at the position before the token.

    Args:
        model: critic (see `position_scores`).
        response_width: number of response columns, T.
        **forward: further arguments of `position_scores`.
    """
    scores_BS = position_scores(model, response_width=response_width, **forward)
    return scores_BS[:, -(response_width + 1) : -1]


def response_scores(
    model: Callable[..., Any], *, attention_mask_BS: Tensor, response_width: int, **forward: Any
) -> Tensor:
    """Return the number at each response token [B, T].

    Padded positions have the number of the sample's last token. For an empty response, this is the last token of the
    prompt. If every response is empty, the result has one column for this number.

    Args:
        model: reward model (see `position_scores`).
        attention_mask_BS: 1 at real tokens, 0 at padding.
        response_width: number of response columns, T.
        **forward: further arguments of `position_scores`.
    """
    scores_BS = position_scores(model, attention_mask_BS=attention_mask_BS, response_width=response_width, **forward)
    prompt_width = scores_BS.shape[1] - response_width
    response_lengths_B = attention_mask_BS[:, prompt_width:].sum(dim=-1)
    nth_T = torch.arange(1, max(response_width, 1) + 1, device=attention_mask_BS.device)
    places_BT = prompt_width - 1 + nth_T.minimum(response_lengths_B[:, None])
    return scores_BS.gather(-1, to_device(places_BT, scores_BS.device))


def last_token_scores(scores_BT: Tensor, response_lengths_B: Tensor) -> Tensor:
    """Return the score of each whole response [B]: the score at its last token.

    An empty response has the score of its prompt.

    Args:
        scores_BT: result of `response_scores`.
        response_lengths_B: number of tokens in each response.
    """
    return scores_BT.gather(-1, (response_lengths_B - 1).clamp(min=0)[:, None]).squeeze(-1)
