"""Weights with the names and shapes of checkpoints, for rollout engines.

An engine loads the weights of checkpoints. transformers holds the weights of some models in another layout: with other
names, and with one tensor for all experts of a layer. `save_pretrained` converts the layout back, and so does this
module, without a copy: a tensor of a checkpoint is a range of elements of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_plugins.errors import ConfigError
from rl_plugins.weights.source import WeightMeta, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_KNOWN_BY_EXPERT = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "lfm2_moe", "longcat_flash",
)  # fmt: skip
"""Models whose loader in vLLM knows each expert alone. Other loaders also take one tensor for all experts of a layer,
which is faster."""


@dataclass(frozen=True)
class CheckpointTensor:
    """Tensor of a checkpoint, in a parameter.

    Attributes:
        name: name in the checkpoint.
        shape: shape in the checkpoint.
        first: index of its first element in the flat parameter.
    """

    name: str
    shape: tuple[int, ...]
    first: int

    @property
    def stop(self) -> int:
        """Index after its last element in the flat parameter."""
        return self.first + math.prod(self.shape)


class CheckpointLayout:
    """Tensors of a model's checkpoints, by the parameters of the model.

    Args:
        tensors: tensors of each parameter, in the order of their elements.
    """

    def __init__(self, tensors: Mapping[str, Sequence[CheckpointTensor]]) -> None:
        self._tensors = tensors

    @classmethod
    def of(cls, path: str, metadata: Sequence[WeightMeta], *, trust_remote_code: bool = False) -> CheckpointLayout:
        """Return the layout of a model.

        Args:
            path: Hugging Face name or folder of the model.
            metadata: descriptions of the parameters.
            trust_remote_code: see `LoadingOptions`.

        Raises:
            ConfigError: a tensor of the checkpoint is no range of elements of a parameter.
        """
        model = _model_without_weights(path, trust_remote_code)
        if model is None or not _needs_checkpoint(model):
            return cls({})
        return cls({meta.name: _tensors_of(model, meta) for meta in metadata})

    def apply(self, source: WeightSource) -> WeightSource:
        """Return the weights in the layout of the checkpoint."""
        return CheckpointWeightSource(source, self._tensors) if self._tensors else source


class CheckpointWeightSource:
    """Weights in the layout of the checkpoint.

    Args:
        source: weights in the layout of the model.
        tensors: tensors of each parameter.
    """

    def __init__(self, source: WeightSource, tensors: Mapping[str, Sequence[CheckpointTensor]]) -> None:
        self._source, self._tensors = source, tensors

    def metadata(self) -> list[WeightMeta]:
        """Return the descriptions of the tensors of the checkpoint."""
        return [
            replace(meta, name=tensor.name, shape=tensor.shape)
            for meta in self._source.metadata()
            for tensor in self._tensors[meta.name]
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors. Collective."""
        for name, parameter in self._source:
            flat = parameter.flatten()
            for tensor in self._tensors[name]:
                yield tensor.name, flat[tensor.first : tensor.stop].view(tensor.shape)

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield this rank's parts of the tensors: name, first element, flat part."""
        for name, start, part in self._source.shards():
            for tensor in self._tensors[name]:
                first, stop = max(start, tensor.first), min(start + len(part), tensor.stop)
                if first < stop:
                    yield tensor.name, first - tensor.first, part[first - start : stop - start]


def _model_without_weights(path: str, trust_remote_code: bool) -> PreTrainedModel | None:
    """Return the model on the meta device; None for a class that is not of transformers, which converts nothing."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from rl_plugins.hub.files import model_folder

    folder = model_folder(path, weights=False, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)
    return model


def _needs_checkpoint(model: PreTrainedModel) -> bool:
    """Return True if vLLM's loader of the model does not know the layout of transformers."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming

    if model.config.model_type in _KNOWN_BY_EXPERT:
        return True
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(isinstance(one, WeightRenaming) and not isinstance(one, PrefixChange) for one in conversions)


def _tensors_of(model: PreTrainedModel, meta: WeightMeta) -> list[CheckpointTensor]:
    """Find the tensors of a parameter by the conversion of its indices; the last axis is never cut."""
    from transformers.core_model_loading import revert_weight_conversion

    shape, has_rows = meta.shape, len(meta.shape) > 1
    # Rows of two elements stand for whole rows. The conversion would drop an axis of size 1.
    width, probed = (shape[-1], 2) if has_rows else (1, 1)
    indices = torch.arange(math.prod(shape) // width * probed).view(*shape[:-1], probed if has_rows else shape[0])
    tensors = []
    for name, part in revert_weight_conversion(model, {meta.name: indices}).items():
        flat = part.flatten()
        is_range = len(flat) > 0 and torch.equal(flat, torch.arange(int(flat[0]), int(flat[0]) + len(flat)))
        if not is_range or (has_rows and part.shape[-1] != probed):
            raise ConfigError(
                f"{meta.name} of {type(model).__name__} has another layout in checkpoints, so vLLM cannot get the "
                "weight: use TransformersRollout (in a recipe: rollout.engine=transformers)"
            )
        part_shape = (*part.shape[:-1], width) if has_rows else tuple(part.shape)
        tensors.append(CheckpointTensor(name, part_shape, int(flat[0]) // probed * width))
    return sorted(tensors, key=lambda tensor: tensor.first)
