"""Products of a trained model with 8-bit floating point numbers, by torchao.

The linear layers inside the blocks become torchao's `Float8Linear`. In each of the three products of such a layer
(output, gradient of the input, gradient of the weight), the layer scales and rounds both factors to 8 bits. The weights
keep names, shapes and dtypes, so strategies, optimizers, checkpoints, exports and weight updates do not change.

Sources: FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433; torchao.float8,
https://github.com/pytorch/ao/tree/v0.18.0/torchao/float8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_plugins.config.precision import FLOAT8_SCALES
from rl_plugins.errors import ConfigError
from rl_plugins.extras import check_installed
from rl_plugins.model_json import expert_count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "has_float8_layers"
_MULTIPLE = 16
"""Divisor of both sizes of a matrix for the kernels."""
_LEAST_CAPABILITY = (8, 9)


def float8_config(scales: str) -> Any:
    """Return torchao's settings for one scale of a matrix (`tensorwise`) or of each row (`rowwise`)."""
    from torchao.float8 import Float8LinearConfig

    # The gradient of a weight is a sum over tokens, and the number of tokens is rarely a multiple of 16.
    return replace(Float8LinearConfig.from_recipe_name(scales), pad_inner_dim=True)


def check_float8(scales: str) -> None:
    """Check for torchao and for a GPU with 8-bit products, before a model is loaded.

    Raises:
        ConfigError: `scales` is unknown, torchao is not installed, or there is no such GPU.
    """
    option = f"float8={scales}"
    if scales not in FLOAT8_SCALES:
        raise ConfigError(f"{option} is unknown: use one of {', '.join(FLOAT8_SCALES)}")
    check_installed("torchao", "torchao", option)
    if float8_config(scales).emulate:
        # Tests compute the same numbers without the kernels.
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"{option}: 8-bit products need a GPU, and CUDA finds none here: leave float8 out")
    if (capability := torch.cuda.get_device_capability()) < _LEAST_CAPABILITY:
        raise ConfigError(
            f"{option}: 8-bit products need a GPU of compute capability {_words(_LEAST_CAPABILITY)} or more, and this "
            f"GPU has {_words(capability)}: leave float8 out"
        )


def use_float8(model: PreTrainedModel, scales: str) -> None:
    """Replace the linear layers inside the blocks of a loaded model by layers with 8-bit products.

    Output heads, scalar heads, vision towers, and layers whose sizes the kernels cannot divide stay as they are.

    Args:
        model: model of transformers without an adapter, before the start of its model engine.
        scales: see `float8_config`.

    Raises:
        ConfigError: the model is in float16, is a mixture of experts, or has no layer for 8-bit products.
    """
    from torchao.float8 import convert_to_float8_training

    kind = type(model).__name__
    if model.dtype == torch.float16:
        raise ConfigError(
            f"float8={scales}: 8-bit products round more than float16 and bfloat16, so precision=16-mixed has no use: "
            "use bf16-mixed, or leave float8 out"
        )
    if expert_count(model.config.get_text_config().to_dict()):
        raise ConfigError(f"float8 has not been tried with mixtures of experts such as {kind}: leave float8 out")
    named = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.get_decoder().modules() if type(module).__name__ in named]
    layers = {layer for block in blocks for layer in block.modules() if _fits(layer)}
    if not layers:
        raise ConfigError(
            f"float8: no block of {kind} has a linear layer with sizes that {_MULTIPLE} divides: leave float8 out"
        )
    convert_to_float8_training(model, module_filter_fn=lambda layer, _: layer in layers, config=float8_config(scales))
    setattr(model, _MARK, True)


def has_float8(model: Callable[..., Any]) -> bool:
    """Return True if a model, or the model inside a model engine, has layers with 8-bit products."""
    return getattr(getattr(model, "module", model), _MARK, False)


@contextmanager
def plain_products(model: nn.Module) -> Iterator[None]:
    """Let a model multiply without rounding to 8 bits inside this context.

    With one scale for a matrix, each token of a row changes the rounding of all others. A trial that compares the
    outputs of rows would take this for attention between samples.
    """
    layers: list[nn.Module] = []
    if has_float8(model):
        from torchao.float8.float8_linear import Float8Linear

        layers = [layer for layer in model.modules() if isinstance(layer, Float8Linear)]
    for layer in layers:
        layer.forward = MethodType(nn.Linear.forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _fits(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and not layer.in_features % _MULTIPLE and not layer.out_features % _MULTIPLE


def _words(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
