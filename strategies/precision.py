"""Conversion of parameters to the dtype of the passes, without the buffers of models of transformers.

Lightning's plugins for `bf16-true` convert buffers, too, and so does `zero.Init` of DeepSpeed. Rotary frequencies in
bfloat16 are other positions: the policy would differ from the model that the rollout engine runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from torch import nn
from typing_extensions import override

from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.errors import ConfigError

_CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ParameterPrecision(Precision):
    """Precision of models whose parameters have the dtype of the passes; see `with_parameters_in`."""

    def __init__(self, precision: str) -> None:
        self.precision = precision  # type: ignore[assignment]

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return with_parameters_in(module, dtype_of_passes(str(self.precision)))


class _DeepSpeedParameterPrecision(DeepSpeedPrecision):
    """Precision of model engines of DeepSpeed, which convert parameters by themselves and keep the buffers."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return with_parameters_in(module, dtype_of_passes(self.precision)) if "true" in self.precision else module


def with_parameters_in(module: nn.Module, dtype_name: str) -> nn.Module:
    """Convert the parameters of a module with floating point numbers to a dtype in place; return the module.

    Buffers outside models of transformers are converted, too: code of a user adds such a buffer to the activations.
    """
    from transformers import PreTrainedModel

    dtype: torch.dtype = getattr(torch, dtype_name)
    of_transformers = [child for child in module.modules() if isinstance(child, PreTrainedModel)]
    kept = {id(buffer) for model in of_transformers for buffer in model.buffers()}
    for tensor in [*module.parameters(), *(buffer for buffer in module.buffers() if id(buffer) not in kept)]:
        if tensor.dtype in _CASTABLE and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
    return module


def precision_of_deepspeed(plugin: Precision, *, keeps_buffers: bool) -> DeepSpeedPrecision:
    """Return the precision plugin for DeepSpeed with the precision of a plugin. A class of the user stays.

    Args:
        plugin: plugin with the precision.
        keeps_buffers: False to convert all tensors of the module, as Lightning does.

    Raises:
        ConfigError: DeepSpeed has no float16 on this device.
    """
    precision = str(plugin.precision)
    if dtype_of_passes(precision) == "float16":
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise ConfigError(
                f"precision={precision}: DeepSpeed has no float16 on this device: use FSDPStrategy (in a recipe: "
                "strategy.name=fsdp), or another precision"
            )
    if isinstance(plugin, DeepSpeedPrecision) and type(plugin) is not DeepSpeedPrecision:
        return plugin
    kind = _DeepSpeedParameterPrecision if keeps_buffers else DeepSpeedPrecision
    return kind(cast(Any, plugin.precision))


@contextmanager
def buffers_as_built() -> Iterator[None]:
    """Let `deepspeed.zero.Init` convert parameters alone inside the block.

    By itself, `zero.Init` converts each new tensor, also a tensor with an explicit dtype. Models build their buffers
    with the dtype of an ordinary load inside the block.
    """
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, Init

    class ParameterInit(Init):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, tensor_overrides=[DeepSpeedTensorOverride.device], **options)

        def _post_init_method(self, module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point() and parameter.dtype != self.dtype:
                    parameter.data = parameter.data.to(self.dtype)
            super()._post_init_method(module)

    # transformers enters `deepspeed.zero.Init` by this name.
    deepspeed.zero.Init = ParameterInit
    try:
        yield
    finally:
        deepspeed.zero.Init = Init
