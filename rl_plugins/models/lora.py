"""LoRA: a model learns a low-rank change of its linear layers, `scaling * B A`, while its own weights stay as they are.

peft makes the adapter; a model with one is its `PeftModel`, whoever made it. With the adapter off it is the model that
it started from, so that a reference needs no second copy. To an engine or an export it gives plain weights: of each
adapted layer the sum of both, computed one layer at a time.

Axes: `O` output features, `I` input features, `R` the rank, `N` elements of a flattened weight.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_plugins.errors import ConfigError
from rl_plugins.rollout.weights import WeightMeta, WeightSource

if TYPE_CHECKING:
    from peft import PeftModel

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraConfig:
    """An adapter.

    Attributes:
        rank: of the change.
        alpha: the change is multiplied by `alpha / rank`.
        dropout: of the adapter's inputs, while training.
        target_modules: `all-linear` for all linear layers but the output head, names of layers (`q_proj`), or a
            regular expression for their full names.

    Source: LoRA, https://arxiv.org/abs/2106.09685.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | Sequence[str] = "all-linear"


def add_adapter(model: Any, config: LoraConfig) -> PeftModel:
    """Freeze a transformers model and give it an adapter that changes nothing yet; a scalar head is trained whole.

    The adapter has the dtype of the model. Of a model in shards (ZeRO-3) the adapter comes into being whole, on every
    rank; DeepSpeed shards it, from rank 0's, when it makes the engine, and so does FSDP2.

    Args:
        model: with an output head, or with a scalar one.
        config: of the adapter.

    Raises:
        ConfigError: `target_modules` are not in the model, or not linear.
    """
    import peft

    is_causal = model.get_output_embeddings() is not None
    children = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    heads = [] if is_causal else [name for name in children if name != model.base_model_prefix]
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a number like any other
        lora_dropout=config.dropout,
        target_modules=targets,
        exclude_modules=heads or None,
        modules_to_save=heads or None,
        task_type=peft.TaskType.CAUSAL_LM if is_causal else peft.TaskType.TOKEN_CLS,
    )
    try:
        # In low precision the optimizer has the float32 weights, as it has those of a model that is trained whole.
        adapted: Any = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules={targets} does not fit {type(model).__name__}: {error}") from None
    adapted_layers(adapted)
    trained: PeftModel = adapted.train(model.training)
    return trained


def has_adapter(model: nn.Module) -> TypeGuard[PeftModel]:
    """Whether the model is one of peft's."""
    # Where nobody has imported the library, nothing can be of its class, and the import takes seconds.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


@contextmanager
def adapter_off(model: PeftModel) -> Iterator[None]:
    """Inside, the model is the one that it started from, and in evaluation mode like any frozen model."""
    training = model.training
    model.eval()
    try:
        with model.disable_adapter():
            yield
    finally:
        model.train(training)


def adapted_layers(model: PeftModel) -> dict[str, Any]:
    """The layers that the adapter changes, by the names of their weights in the model.

    Raises:
        ConfigError: it does something else than add `scaling * B A` to weights of linear layers.
    """
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {}
    parameters = dict(model.named_parameters())
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        weight = f"{name}.base_layer.weight"
        plain = isinstance(layer, Linear) and not layer.lora_variant and not any(layer.lora_bias.values())
        if not plain or layer.merged or len(layer.active_adapters) != 1:
            raise ConfigError(
                f"the adapter of {name.removeprefix(_PREFIX)} ({type(layer).__name__}) is not one plain LoRA adapter "
                "of a linear layer: others cannot be sent to a rollout engine or exported. Choose other "
                "target_modules, or another peft configuration"
            )
        if weight not in parameters:
            raise ConfigError(
                f"{name.removeprefix(_PREFIX)} shares its weight with another layer, which its adapter would change as "
                "well: leave it out of target_modules"
            )
        layers[weight] = layer
    return layers


class MergedWeightSource:
    """The weights of a model with an adapter, under the names and with the sizes that it would have without.

    Nothing in the model changes. The products are computed in float32, added, and rounded once to the dtype of the
    weights. While it is iterated over, it holds the adapter whole.

    Args:
        source: the weights of `model` as they are.
        model: the model.
    """

    def __init__(self, source: WeightSource, model: PeftModel) -> None:
        self._source, self._model = source, model
        self._layers = adapted_layers(model)
        self._adapter = model.active_adapter
        parameters = dict(model.named_parameters())
        plain = {name: _plain_name(name, self._adapter) for name in parameters}
        self._names = {name: as_plain for name, as_plain in plain.items() if as_plain is not None}
        self._trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}

    def metadata(self) -> list[WeightMeta]:
        """Those of the plain model; what the adapter does not touch is frozen."""
        changing = self._trained.keys() | self._layers.keys()
        return [
            replace(meta, name=self._names[meta.name], frozen=meta.name not in changing)
            for meta in self._source.metadata()
            if meta.name in self._names
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors. Collective."""
        changes = self._changes()
        for name, tensor in self._source:
            if name in changes:
                yield self._names[name], changes[name].added_to(tensor.flatten(), 0).view(tensor.shape)
            elif name in self._names:
                yield self._names[name], tensor

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """This rank's parts; of an adapted weight the product is computed for this part alone. Collective."""
        changes = self._changes()
        for name, start, part in self._source.shards():
            if name in changes:
                yield self._names[name], start, changes[name].added_to(part, start)
            elif name in self._names:
                yield self._names[name], start, part

    def adapter(self) -> dict[str, Tensor]:
        """What is trained, whole, under its own names. Collective."""
        return dict(zip(self._trained, _whole(list(self._trained.values())), strict=True))

    def adapter_files(self) -> dict[str, bytes]:
        """What peft saves of the adapter, by file name; empty on all ranks but the first. Collective."""
        weights = self.adapter()
        if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            self._model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
            return {path.name: path.read_bytes() for path in Path(folder).glob("adapter_*")}

    def _changes(self) -> dict[str, _Change]:
        adapter = self._adapter
        pairs = [(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight) for layer in self._layers.values()]
        whole = iter(_whole([factor for pair in pairs for factor in pair]))
        return {
            name: _Change.of(A_RI=next(whole), B_OR=next(whole), layer=layer, scaling=layer.scaling[adapter])
            for name, layer in self._layers.items()
        }


def plain_weights(source: WeightSource, model: nn.Module) -> WeightSource:
    """The weights of a model, with its adapter merged if it has one."""
    return MergedWeightSource(source, model) if has_adapter(model) else source


@dataclass(frozen=True)
class _Change:
    """`scaling * left @ right`, of the shape of a weight as its layer stores it."""

    left: Tensor
    right: Tensor
    scaling: float

    @classmethod
    def of(cls, *, A_RI: Tensor, B_OR: Tensor, layer: Any, scaling: float) -> _Change:
        # GPT-2 and its kin store their weights as [I, O].
        return cls(A_RI.T, B_OR.T, scaling) if layer.fan_in_fan_out else cls(B_OR, A_RI, scaling)

    def added_to(self, part_N: Tensor, start: int) -> Tensor:
        """The part of the flattened weight that begins at `start`, changed."""
        width = self.right.shape[1]
        first, last = start // width, -(-(start + part_N.numel()) // width)
        dtype = torch.promote_types(part_N.dtype, torch.float32)
        rows = self.left[first:last].to(dtype) @ self.right.to(dtype)
        change_N = rows.flatten()[start - first * width :][: part_N.numel()]
        return torch.add(part_N.to(dtype), change_N, alpha=self.scaling).to(part_N.dtype)


def _whole(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The parameters themselves; of those in shards, whole copies, gathered at once. Collective."""
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return [parameter.full_tensor().detach() for parameter in parameters if isinstance(parameter, DTensor)]
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return [parameter.detach() for parameter in parameters]
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


def _plain_name(name: str, adapter: str) -> str | None:
    """The name in a model without the adapter; None for what that model does not have."""
    if ".lora_A." in name or ".lora_B." in name or ".original_module." in name:
        return None
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(f".modules_to_save.{adapter}.", ".")
