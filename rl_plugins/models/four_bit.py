"""Frozen weights in 4 bits under an adapter (QLoRA), by the kernels of bitsandbytes.

A number is one of 16 levels for normally distributed numbers (NF4), multiplied by the scale of its block of 64 numbers.
The scales are in 8 bits, with a scale of their own for each 256 scales.

The codes of a layer are a parameter of bytes, so ZeRO and FSDP2 shard and gather the codes like other weights. Every
rank has all scales, which take 1/32 of the bytes of the codes. A pass makes the numbers of one layer at a time.

Source: QLoRA, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.extras import check_installed
from rl_plugins.weights.source import WeightMeta, WeightSource

CODES = 2
"""Codes in a byte."""
_BLOCK, _SCALES = 64, 256
"""Numbers with a common scale, and scales with a common scale."""


class FourBitLinear(nn.Linear):
    """Frozen linear layer with a weight in 4 bits.

    The states of a model leave the codes out: they remain in the folder of the model, and are made again.

    Args:
        base: linear layer with the whole weight, or without weights on the device `meta`.
    """

    scales: Tensor
    scale_levels: Tensor
    scale_sizes: Tensor
    mean_scale: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.number_dtype = base.weight.dtype
        self.bias = base.bias
        codes, scales, *constants = _quantize(base.weight.detach())
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", scales, persistent=False)
        for name, constant in zip(("scale_levels", "scale_sizes", "mean_scale"), constants, strict=True):
            # As integers: a change of the model's dtype rounds all buffers of floating-point numbers.
            self.register_buffer(name, constant.view(torch.int32), persistent=False)
        self.train(base.training)

    @override
    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Product.apply(input, self)
        return product

    def numbers(self, codes: Tensor, start: int = 0) -> Tensor:
        """Return the numbers [N] of a part of the flattened codes.

        Args:
            codes: bytes of the part.
            start: index of the first byte among all bytes of the layer.
        """
        from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

        if not codes.numel():
            return codes.new_empty(0, dtype=self.number_dtype)
        levels, sizes, mean = (
            constant.view(torch.float32) for constant in (self.scale_levels, self.scale_sizes, self.mean_scale)
        )
        scales = dequantize_blockwise(self.scales, absmax=sizes, code=levels, blocksize=_SCALES) + mean
        # The kernel begins at the first byte of a block.
        block, before = divmod(start, _BLOCK // CODES)
        bytes_N = functional.pad(codes.reshape(-1), (before, 0))
        state = QuantState(
            absmax=scales[block:][: -(-bytes_N.numel() * CODES // _BLOCK)].contiguous(),
            shape=torch.Size([bytes_N.numel() * CODES]),
            dtype=self.number_dtype,
            blocksize=_BLOCK,
            quant_type="nf4",
        )
        numbers: Tensor = dequantize_4bit(bytes_N, state)
        # The kernel for processors adds an axis.
        return numbers.view(-1)[before * CODES :]

    def whole_weight(self) -> Tensor:
        """Return the weight [out_features, in_features]. The codes must be whole on this rank."""
        return self.numbers(self.weight.detach()).view(self.out_features, self.in_features)

    @override
    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weight"]

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        state_dict[f"{prefix}weight"] = self.weight
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Product(torch.autograd.Function):
    """Product with the weight of a `FourBitLinear`.

    The backward pass makes the numbers again from the codes, which a sharding strategy has gathered again. A reference
    to the gathered codes would keep the codes of all layers until then.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, inputs.dtype
        bias = None if layer.bias is None else layer.bias.to(inputs.dtype)
        return functional.linear(inputs, layer.whole_weight().to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        return (gradients @ ctx.layer.whole_weight().to(gradients.dtype)).to(ctx.dtype), None


def quantize_layer(layer: nn.Module, name: str) -> None:
    """Replace the frozen linear layer below an adapter of peft by a layer with 4-bit weights.

    Under ZeRO-3, all ranks gather the weight, and then shard the codes. Collective.

    Raises:
        ConfigError: bitsandbytes is not installed, or the layer is not a plain linear layer, or in float64.
    """
    base: Any = layer.base_layer
    check_installed("bitsandbytes", "bitsandbytes", "LoraConfig: quantization='nf4'")
    weight: Any = base.weight
    if type(base) is not nn.Linear or base.in_features * base.out_features % CODES:
        raise ConfigError(
            f"LoraConfig: quantization='nf4': {name} ({type(base).__name__}) is not a linear layer with an even number "
            "of weights: leave the layer out of target_modules"
        )
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"LoraConfig: quantization='nf4': {name} has weights of {weight.dtype}: use Trainer(precision='32-true') "
            "or a lower precision"
        )
    with _gathered(weight):
        quantized = FourBitLinear(base)
    if hasattr(weight, "ds_id"):
        weight.convert_to_zero_parameters(param_list=[quantized.weight])
    layer.base_layer = quantized


def four_bit_layers(model: nn.Module) -> dict[str, FourBitLinear]:
    """Return the layers with 4-bit weights, by the names of their weights in the model."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, FourBitLinear)}


class DequantizedWeightSource:
    """Weights of a model with 4-bit layers, as the numbers that the passes compute with.

    Args:
        source: weights of `model`, in which 4-bit weights are codes.
        model: model with 4-bit layers.
    """

    def __init__(self, source: WeightSource, model: nn.Module) -> None:
        self._source, self._layers = source, four_bit_layers(model)

    def metadata(self) -> list[WeightMeta]:
        """Return names, dtypes and shapes of the numbers."""
        return [
            replace(meta, dtype=layer.number_dtype, shape=(layer.out_features, layer.in_features))
            if (layer := self._layers.get(meta.name))
            else meta
            for meta in self._source.metadata()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and full tensors. Collective."""
        for name, tensor in self._source:
            layer = self._layers.get(name)
            yield name, layer.numbers(tensor).view(layer.out_features, layer.in_features) if layer else tensor

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """Iterate over this rank's parts: name, offset, flat part."""
        for name, start, part in self._source.shards():
            layer = self._layers.get(name)
            yield (name, start * CODES, layer.numbers(part, start)) if layer else (name, start, part)


def _quantize(weight: Tensor) -> tuple[Tensor, ...]:
    """Return codes [N / 2, 1] and scales [N / 64] in bytes, and levels, sizes and the mean of the scales."""
    if weight.is_meta:
        # Another rank sends the tensors.
        blocks, levels = -(-weight.numel() // _BLOCK), 256
        sizes = (weight.numel() // CODES, 1), (blocks,), (levels,), (-(-blocks // _SCALES),), ()
        codes, scales, *constants = (weight.new_empty(size, dtype=torch.float32) for size in sizes)
        return codes.byte(), scales.byte(), *constants
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=_BLOCK, compress_statistics=True, quant_type="nf4")
    return codes, state.absmax, state.state2.code.to(weight.device), state.state2.absmax, state.offset


def _gathered(weight: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which a weight is whole, if ZeRO-3 has sharded the weight. Collective."""
    if not hasattr(weight, "ds_id"):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([weight])
    return context
