"""LoRA adapters: training of a low-rank change of linear layers and experts, `scaling * B A`, with frozen base weights.

peft makes the adapter, and a model with an adapter is a `PeftModel`. With the adapter off, the model computes the
outputs of the base model, so a reference model needs no second copy. Rollout engines and exports get merged weights:
the sum of base weight and change, computed for one layer at a time. A base weight in 4 bits gives its numbers.

Axes: `E` experts, `O` output features, `I` input features, `R` rank, `N` elements of a flattened weight. A linear layer
has one expert.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_plugins.config.models import LANGUAGE_MODEL, LoraConfig
from rl_plugins.errors import ConfigError
from rl_plugins.hub.names import model_name
from rl_plugins.models.float8 import has_float8
from rl_plugins.models.four_bit import DequantizedWeightSource, four_bit_layers, quantize_layer
from rl_plugins.vision_language import is_vision_language, language_model
from rl_plugins.weights.source import WeightMeta, WeightSource, full_tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import Linear, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel

_PREFIX = "base_model.model."
_ALL_LINEAR = "all-linear"
_HEADS = ("lm_head", "score")
_EXPERT_LAYERS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
"""Names of the layers of experts in peft's table."""


def with_adapter(model: nn.Module, config: LoraConfig | None) -> nn.Module:
    """Return the model, with an adapter if the settings have a rank above 0; see `add_adapter`."""
    return add_adapter(model, config) if config is not None and config.rank else model


def add_adapter(model: nn.Module, config: LoraConfig) -> PeftModel:
    """Freeze a transformers model and add an adapter.

    A new adapter does not change the outputs before training. With a path, the adapter has the weights at the path. The
    adapter has the dtype of the model. A scalar head is trained whole. For a sharded model (ZeRO-3), every rank
    makes the whole adapter. DeepSpeed and FSDP2 shard the adapter of rank 0 when they make the model engine.

    Args:
        model: model of transformers: a causal language model, or a model with a scalar head.
        config: settings of the adapter.

    Raises:
        ConfigError: `target_modules` names layers that the model does not have or that are not linear; or
            `exclude_modules` names a layer that the model does not have, or leaves no layer; or the model has
            no experts, or `target_modules` names layers of experts without `experts`, or experts have dropout; or a
            layer cannot have 4-bit weights; or the model has layers with 8-bit products; or see `load_adapter`.
    """
    import peft

    if has_float8(model):
        raise ConfigError("lora has not been tried with float8: leave one of them out")
    if config.experts and config.exclude_modules:
        # peft does not ask `exclude_modules` about parameters of experts.
        raise ConfigError("LoraConfig: exclude_modules leaves out no experts: use target_modules, or experts=False")
    pretrained = cast("PreTrainedModel", model)
    is_causal = pretrained.get_output_embeddings() is not None
    children = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    heads = [] if is_causal else [name for name in children if name != pretrained.base_model_prefix]
    targets = _targets(model, config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=config.dropout,
        target_modules=targets,
        target_parameters=_expert_parameters(model) if config.experts else None,
        exclude_modules=_excluded(model, config.exclude_modules, heads),
        modules_to_save=heads or None,
        task_type=peft.TaskType.CAUSAL_LM if is_causal else peft.TaskType.TOKEN_CLS,
    )
    try:
        # Without autocast: for low precision, the optimizer has float32 copies, as for a model that is trained whole.
        adapted: Any = peft.get_peft_model(pretrained, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(
            f"LoraConfig: target_modules={targets} does not fit {type(model).__name__}: {error}"
        ) from None
    layers = adapted_layers(adapted)
    if not config.experts and any(not name.endswith(".weight") for name in layers):
        raise ConfigError(
            f"LoraConfig: target_modules={targets} names layers of experts: use experts=True for an adapter of the "
            "experts, and leave these layers out"
        )
    if config.path:
        from rl_plugins.models.saved_adapter import load_adapter

        load_adapter(adapted, config)
    if config.quantization:
        for weight, layer in layers.items():
            quantize_layer(layer, weight.removeprefix(_PREFIX).removesuffix(".base_layer.weight"))
    if (name := model_name(pretrained.name_or_path or "")) is not None:
        # peft loads the base model of an adapter by these two.
        settings.base_model_name_or_path, settings.revision = name.repository, name.revision
    trained: PeftModel = adapted.train(model.training)
    return trained


def _targets(model: nn.Module, target_modules: Any) -> str | list[str]:
    """Return the layers with an adapter, for peft."""
    if not isinstance(target_modules, str):
        return list(target_modules)
    if target_modules not in (_ALL_LINEAR, LANGUAGE_MODEL):
        return target_modules
    part = language_model(model) if target_modules == LANGUAGE_MODEL and is_vision_language(model) else ""
    has_experts = any(name.endswith(".experts.down_proj") for name, _ in model.named_parameters())
    if not part and not has_experts:
        return _ALL_LINEAR
    modules = model.get_submodule(part).named_modules()
    names = {name.rpartition(".")[2] for name, layer in modules if isinstance(layer, nn.Linear)}
    # peft adds the experts to all linear layers, and to each list with the name of a layer of experts.
    chosen = sorted(names - {"lm_head"} - (_EXPERT_LAYERS if has_experts else set()))
    return rf"{re.escape(part)}\.(?:.*\.)?(?:{'|'.join(chosen)})" if part else chosen


def _excluded(model: nn.Module, exclude_modules: Any, heads: list[str]) -> str | list[str] | None:
    """Return the layers without an adapter, for peft: the given layers, and heads, which are trained whole."""
    if exclude_modules is None:
        return heads or None
    pattern = exclude_modules if isinstance(exclude_modules, str) else None
    names = [name for name, layer in model.named_modules() if not any(True for _ in layer.children())]
    # A model has one of these heads.
    names += _HEADS
    for each in [exclude_modules] if pattern else exclude_modules:
        try:
            found = re.compile(f"(?:{pattern})" if pattern else rf"(?:.*\.)?{re.escape(each)}")
        except re.error as error:
            raise ConfigError(f"LoraConfig: exclude_modules={each}: not a regular expression ({error})") from None
        if not any(map(found.fullmatch, names)):
            raise ConfigError(
                f"LoraConfig: exclude_modules={each}: {type(model).__name__} has no such layer: use names such as "
                "q_proj, or a regular expression for whole names, or leave it out"
            )
    if pattern is None:
        return [*exclude_modules, *heads]
    return "|".join(f"(?:{part})" for part in (pattern, *(rf"(?:.*\.)?{re.escape(head)}" for head in heads)))


def _expert_parameters(model: nn.Module) -> list[str]:
    """Return the ends of the names of all parameters with the matrices of a layer's experts [E, O, I] or [E, I, O].

    Raises:
        ConfigError: the model has no experts.
    """
    found = {
        ".".join(name.split(".")[-2:])
        for name, parameter in model.named_parameters()
        if ".experts." in name and len(getattr(parameter, "ds_shape", parameter.shape)) == 3
    }
    if not found:
        raise ConfigError(f"LoraConfig: experts=True, and {type(model).__name__} has no experts: leave experts out")
    return sorted(found)


def has_adapter(model: nn.Module) -> TypeGuard[PeftModel]:
    """Return True if the model is a `PeftModel`."""
    # No import of peft, which takes seconds: without an earlier import, no object can be a `PeftModel`.
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def check_new_adapter(model: PeftModel, on_any_rank: Callable[[bool], bool]) -> None:
    """Check that an adapter does not change the model yet: a reference would lack the changes. Collective.

    Args:
        model: model with an adapter, whose reference is the model without the adapter.
        on_any_rank: function that returns True on all ranks if the argument is True on one.

    Raises:
        ConfigError: the adapter is trained, or its start changes the model.
    """
    # New adapters have zeros in one of two factors; peft swaps the factors of embeddings.
    used = tuple(f".{part}.{name}" for part in ("lora_B", "lora_embedding_A") for name in model.active_adapters)
    factors = (p for name, p in model.named_parameters() if name.removesuffix(".weight").endswith(used))
    if on_any_rank(any(bool(getattr(factor, "ds_tensor", factor).any()) for factor in factors)):
        raise ConfigError(
            "the adapter of the model is trained already, and the reference would be the model without the adapter: "
            "merge the adapter first, or name the reference (reference=FOLDER), also if it is the base model"
        )


@contextmanager
def adapter_off(model: PeftModel) -> Iterator[None]:
    """Turn the adapter off inside the block. The model is in evaluation mode there, as any frozen model."""
    training = model.training
    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    def restore() -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(learns[name])

    model.eval()
    try:
        with model.disable_adapter():
            # PEFT turns the gradient of the adapter off. In its first forward pass, FSDP2 chooses the dtype of
            # gradients by the parameters with gradients.
            restore()
            yield
    finally:
        model.train(training)
        # PEFT turns on the gradient of the whole adapter, also of layers that do not learn, such as a vision tower's.
        restore()


def adapted_layers(model: PeftModel) -> dict[str, Any]:
    """Return the layers with an adapter, by the names of their base weights in the model.

    Raises:
        ConfigError: an adapter does something other than add `scaling * B A` to the weight of a linear layer or to the
            matrices of experts; or only one of two layers with one weight is trained whole.
    """
    from peft.tuners.lora import Linear, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    _check_shared_weights(model)
    layers = {}
    parameters = dict(model.named_parameters())
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        weight = _weight_name(name, layer)
        plain = (
            isinstance(layer, Linear | ParamWrapper) and not layer.lora_variant and not any(layer.lora_bias.values())
        )
        if not plain or layer.merged or len(layer.active_adapters) != 1:
            raise ConfigError(
                f"the adapter of {name.removeprefix(_PREFIX)} ({type(layer).__name__}) is not one plain LoRA adapter "
                "of a linear layer or of experts. Other adapters cannot be sent to a rollout engine or exported: "
                "choose other target_modules, or another peft configuration"
            )
        if weight not in parameters:
            raise ConfigError(
                f"{name.removeprefix(_PREFIX)} shares its weight with another layer, and an adapter would change both "
                f"layers: remove {name.removeprefix(_PREFIX)} from target_modules"
            )
        layers[weight] = layer
    return layers


def _check_shared_weights(model: PeftModel) -> None:
    """Refuse a copy of `modules_to_save` for one of two layers with a shared weight: the base model has one weight."""
    trained: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".modules_to_save." in name:
            continue
        copied = name.replace(".original_module.", f".modules_to_save.{model.active_adapter}.")
        one, first = trained.setdefault(id(parameter), (name, model.get_parameter(copied)))
        if model.get_parameter(copied) is not first:
            layers = [each.removeprefix(_PREFIX).replace(".original_module.", ".") for each in (one, name)]
            raise ConfigError(
                f"{' and '.join(layers)} are one weight, and modules_to_save of the adapter trains a copy for one of "
                "them alone, which cannot be sent to a rollout engine or exported: leave both out of modules_to_save, "
                "or set ensure_weight_tying=True in the peft configuration"
            )


def _weight_name(name: str, layer: BaseTunerLayer) -> str:
    """Return the name of the parameter that an adapter changes. peft puts one adapter of experts around another."""
    inner: Any = layer
    while hasattr(inner, "base_layer"):
        name, inner = f"{name}.base_layer", inner.base_layer
    return f"{name}.{getattr(layer, 'parameter_name', 'weight')}"


class MergedWeightSource:
    """Merged weights of a model with an adapter, with the names and shapes of the base model.

    The model itself does not change. The changes are computed and added in float32, and the sum is rounded once to the
    dtype of the weights. During an iteration, the whole adapter is in memory.

    Args:
        source: weights of `model` without merging.
        model: model with an adapter.
        prepare: makes the parameters of the model readable; called before the adapter is read.
    """

    def __init__(self, source: WeightSource, model: PeftModel, prepare: Callable[[], None] = lambda: None) -> None:
        self._source, self._model, self._prepare = DequantizedWeightSource(source, model), model, prepare
        self._layers = adapted_layers(model)
        self._adapter = model.active_adapter
        parameters = dict(model.named_parameters())
        base_names = {name: _base_name(name, self._adapter) for name in parameters}
        self._names = {name: base_name for name, base_name in base_names.items() if base_name is not None}
        self._trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}

    def metadata(self) -> list[WeightMeta]:
        """Describe the weights of the base model. A weight without an adapter is marked as frozen."""
        changing = self._trained.keys() | self._layers.keys()
        return [
            replace(meta, name=self._names[meta.name], frozen=meta.name not in changing)
            for meta in self._source.metadata()
            if meta.name in self._names
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and full tensors. Collective."""
        changes = self._changes()
        for name, tensor in self._source:
            if name in changes:
                yield self._names[name], changes[name].add_to(tensor.flatten(), 0).view(tensor.shape)
            elif name in self._names:
                yield self._names[name], tensor

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """Iterate over this rank's parts: name, offset, flat part. A change is computed for its part. Collective."""
        changes = self._changes()
        for name, start, part in self._source.shards():
            if name in changes:
                yield self._names[name], start, changes[name].add_to(part, start)
            elif name in self._names:
                yield self._names[name], start, part

    def adapter(self) -> dict[str, Tensor]:
        """Return the full trained tensors by their names in the model with the adapter. Collective."""
        self._prepare()
        return dict(zip(self._trained, _full_tensors(list(self._trained.values())), strict=True))

    def adapter_files(self) -> dict[str, bytes]:
        """Return the files that peft saves for the adapter, by file name. Empty on all ranks but rank 0. Collective.

        Raises:
            ConfigError: see `check_adapter`.
        """
        self.check_adapter()
        weights = self.adapter()
        if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            self._model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
            return {path.name: path.read_bytes() for path in Path(folder).glob("adapter_*")}

    def check_adapter(self) -> None:
        """Check that vLLM can apply the adapter to the weights in the folder of the model.

        Raises:
            ConfigError: the base weights are in 4 bits; or experts, or a layer outside of the language model of a
                vision-language model, have an adapter.
        """
        if four_bit_layers(self._model):
            raise ConfigError(
                "the weights under the adapter are in 4 bits, and vLLM would apply the adapter to other weights: use "
                "lora_rank=0 in VLLMConfig, which merges the adapter into the weights"
            )
        if experts := [name for name in self._layers if not name.endswith(".weight")]:
            raise ConfigError(
                f"the adapter changes {_base_name(experts[0], self._adapter)}, and vLLM applies no adapter to experts: "
                "use lora_rank=0 in VLLMConfig, which merges the adapter into the weights"
            )
        if not is_vision_language(self._model):
            return
        part = f"{_PREFIX}{language_model(self._model)}."
        for name in self._layers:
            if not name.startswith(part):
                layer = name.removeprefix(_PREFIX).removesuffix(".base_layer.weight")
                raise ConfigError(
                    f"the adapter changes {layer}, and vLLM applies adapters to the language model of a "
                    "vision-language model alone: use LoraConfig(target_modules='language-model'), or lora_rank=0 in "
                    "VLLMConfig, which merges the adapter into the weights"
                )

    def _changes(self) -> dict[str, _LowRankChange]:
        self._prepare()
        adapter = self._adapter
        pairs = [(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight) for layer in self._layers.values()]
        factors = iter(_full_tensors([factor for pair in pairs for factor in pair]))
        return {
            name: _LowRankChange.of_factors(next(factors), next(factors), layer, layer.scaling[adapter])
            for name, layer in self._layers.items()
        }


def plain_weights(source: WeightSource, model: nn.Module, prepare: Callable[[], None] = lambda: None) -> WeightSource:
    """Return the weights of a model, with the adapter merged if the model has an adapter; see `MergedWeightSource`."""
    return MergedWeightSource(source, model, prepare) if has_adapter(model) else source


@dataclass(frozen=True)
class _LowRankChange:
    """Change `scaling * left @ right` of each expert, with the shape of the stored weight."""

    left: Tensor
    right: Tensor
    scaling: float

    @classmethod
    def of_factors(cls, A: Tensor, B: Tensor, layer: Linear | ParamWrapper, scaling: float) -> _LowRankChange:
        """Return the change of a layer with the factors A [E * R, I] and B [O, R * E]."""
        experts = getattr(layer, "num_experts", 1)
        A_ERI, B_EOR = A.view(experts, -1, A.shape[1]), B.view(B.shape[0], -1, experts).permute(2, 0, 1)
        # GPT-2 and similar models store transposed weights [I, O], and gpt-oss transposed experts.
        transposed = layer.fan_in_fan_out or not getattr(layer, "_did_swap_in_out_features", True)
        return cls(A_ERI.mT, B_EOR.mT, scaling) if transposed else cls(B_EOR, A_ERI, scaling)

    def add_to(self, part_N: Tensor, start: int) -> Tensor:
        """Return a part of the flattened weight, which begins at `start`, plus the change."""
        width = self.right.shape[2]
        size, end = self.left.shape[1] * width, start + part_N.numel()
        dtype = torch.promote_types(part_N.dtype, torch.float32)
        changed_N = part_N.to(dtype, copy=True)
        # One expert at a time: the changes of all experts need as much memory as the weight in float32.
        for expert in range(start // size, -(-end // size)):
            begin = max(start, expert * size)
            first, last = (begin - expert * size) // width, -(-(min(end, (expert + 1) * size) - expert * size) // width)
            rows = self.left[expert, first:last].to(dtype) @ self.right[expert].to(dtype)
            change = rows.flatten()[begin - expert * size - first * width :][: end - begin]
            changed_N[begin - start :][: change.numel()].add_(change, alpha=self.scaling)
        return changed_N.to(part_N.dtype)


def _full_tensors(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the tensors of unsharded parameters, and gathered copies of sharded parameters. Collective."""
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return [full_tensor(parameter) for parameter in parameters if isinstance(parameter, DTensor)]
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return [parameter.detach() for parameter in parameters]
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


def _base_name(name: str, adapter: str) -> str | None:
    """Return the name of a parameter in the base model. None for a parameter that the base model does not have."""
    if ".lora_A." in name or ".lora_B." in name or ".original_module." in name:
        return None
    return re.sub(r"(?:\.base_layer)+\.", ".", name.removeprefix(_PREFIX)).replace(f".modules_to_save.{adapter}.", ".")
