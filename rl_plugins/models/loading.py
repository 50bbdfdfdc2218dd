"""Loading of causal language models from a Hugging Face name or folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from rl_plugins.errors import ConfigError
from rl_plugins.hub.files import model_folder
from rl_plugins.model_json import AGAIN
from rl_plugins.models.folder import check_folder
from rl_plugins.vision_language import model_class

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel


_DEVICE_MAP: ContextVar[str | None] = ContextVar("device map", default=None)


@contextmanager
def without_weights() -> Iterator[None]:
    """Load models inside this context without weights, on the device `meta`."""
    previous = _DEVICE_MAP.set("meta")
    try:
        yield
    finally:
        _DEVICE_MAP.reset(previous)


def device_map() -> str | None:
    """Return the argument `device_map` of `from_pretrained`: `meta` inside `without_weights`."""
    return _DEVICE_MAP.get()


class LoadingOptions(TypedDict, total=False):
    """Options of `load_causal_lm` and `load_scalar_head`.

    Attributes:
        gradient_checkpointing: recompute activations in the backward pass.
        float8: scales of 8-bit products, for trained models; see `rl_plugins.models.float8`.
        attention: attention of transformers, such as `eager` or `flash_attention_2`; None for `packed_sdpa`.
        trust_remote_code: run Python code that the model's config.json names (`auto_map`). The code has all rights of
            the user.
    """

    gradient_checkpointing: bool
    float8: str | None
    attention: str | None
    trust_remote_code: bool


def load_causal_lm(path: str, *, dtype: torch.dtype, **options: Unpack[LoadingOptions]) -> PreTrainedModel:
    """Load a causal language model, or a vision-language model, in train mode. Dropout is the config's dropout.

    Args:
        path: Hugging Face name or folder.
        dtype: data type of the parameters.
        options: see `LoadingOptions`.

    Raises:
        ConfigError: a weight is missing or has another shape than the model, where transformers would make up a weight;
            a weight is NaN or infinite; the weights are quantized; or the model needs code of its folder, and the code
            is not trusted.
    """
    check_loading(options)
    trust_remote_code = options.get("trust_remote_code", False)
    folder = model_folder(path, trust_remote_code=trust_remote_code)
    check_folder(folder, trust_remote_code=trust_remote_code)
    model: PreTrainedModel
    # The types of transformers know nothing of output_loading_info.
    model, loaded = model_class(folder).from_pretrained(
        folder,
        dtype=dtype,
        device_map=device_map(),
        attn_implementation=options.get("attention"),
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    if lost := sorted(loaded["missing_keys"]):
        raise ConfigError(
            f"{path}: {len(lost)} weights of {type(model).__name__} are missing, such as {lost[0]}: download or export "
            "the model again"
        )
    for name, shape, needed in sorted(loaded["mismatched_keys"]):
        raise ConfigError(
            f"{path}: {name} has the shape {list(shape)}, and config.json needs {list(needed)}: use the config.json of "
            "these weights"
        )
    model.name_or_path = path
    return prepared(model, options)


@contextmanager
def experts_on_first_rank(rank: int) -> Iterator[None]:
    """Read weights of experts on rank 0 alone, for models divided among the ranks by DeepSpeed while loading.

    Transformers stacks the experts of a layer on every rank, and DeepSpeed takes the weights of rank 0. Other ranks
    stack tensors without memory.
    """
    if rank == 0:
        yield
        return
    from transformers import modeling_utils

    read = modeling_utils.load_state_dict

    def without_experts(*arguments: Any, **options: Any) -> dict[str, Tensor]:
        tensors = read(*arguments, **options)
        return {name: tensor.to("meta") if ".experts." in name else tensor for name, tensor in tensors.items()}

    modeling_utils.load_state_dict = without_experts
    try:
        yield
    finally:
        modeling_utils.load_state_dict = read


def _check_finite(model: PreTrainedModel) -> None:
    """Refuse weights that are NaN or infinite, which would make every log-prob NaN.

    Weights on the device `meta`, weights that DeepSpeed has divided among ranks, and 8-bit weights are not read.
    """
    from rl_plugins.models.finite import not_finite

    if bad := not_finite(model.named_parameters()):
        raise ConfigError(
            f"{model.name_or_path}: {bad[0]} has weights that are NaN or infinite: {AGAIN}, or name another model"
        )


def options_for(frozen: str | None, options: LoadingOptions) -> LoadingOptions:
    """Return the options for a frozen model, which has the name `frozen`, or for a trained model, without a name."""
    return {**options, "float8": None} if frozen else options


def check_loading(options: LoadingOptions) -> None:
    """Check for the software and the device that the options need, before a model is loaded.

    Raises:
        ConfigError: something is missing.
    """
    if scales := options.get("float8"):
        from rl_plugins.models.float8 import check_float8

        check_float8(scales)


def prepared(model: PreTrainedModel, options: LoadingOptions) -> PreTrainedModel:
    """Return a loaded model in train mode, with 8-bit products, gradient checkpointing and packed attention.

    Raises:
        ConfigError: a weight is not finite, or the model cannot have 8-bit products, which the options demand.
    """
    from rl_plugins.models.packed_attention import use_packed_attention

    _check_finite(model)
    if scales := options.get("float8"):
        from rl_plugins.models.float8 import use_float8

        use_float8(model, scales)
    if options.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.get("attention") is None:
        use_packed_attention(model)
    return model.train()
