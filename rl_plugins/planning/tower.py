"""Sizes of the part of a vision-language model that reads images: vision tower, and projector to the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plugins.errors import ConfigError

_GATED = {"qwen2_5_vl", "qwen2_5_vl_vision"}
"""Vision towers with a gated MLP."""
_FUSED = {*_GATED, "qwen2_vl", "qwen2_vl_vision"}
"""Vision towers with one matrix for queries, keys and values."""


@dataclass(frozen=True)
class Tower:
    """Sizes of a vision tower and its projector. Biases and norms are left out: less than 1 % of the parameters.

    Attributes:
        layers: Number of blocks.
        block: Input and output width of each linear layer of a block.
        linear: Input and output width of each linear layer outside of blocks.
        others: Parameters of each matrix that is no linear layer, such as the embedding of patches.
    """

    layers: int
    block: tuple[tuple[int, int], ...]
    linear: tuple[tuple[int, int], ...]
    others: tuple[int, ...]

    @property
    def _all_linear(self) -> list[tuple[int, int]]:
        return [*self.block * self.layers, *self.linear]

    @property
    def matrices(self) -> list[int]:
        """Parameters of each matrix."""
        return [*(before * after for before, after in self._all_linear), *self.others]

    def adapter(self, rank: int) -> int:
        """Return the parameters of a LoRA adapter of all linear layers."""
        return rank * sum(before + after for before, after in self._all_linear)


def tower_of(config: Mapping[str, Any], text_hidden: int, where: str) -> Tower | None:
    """Return the vision tower of the model of a config.json; None for a model of text.

    Args:
        config: Content of the file.
        text_hidden: Width of the decoder.
        where: Name of the file for messages.

    Raises:
        ConfigError: A size is missing.
    """
    vision: Mapping[str, Any] | None = config.get("vision_config")
    if vision is None:
        return None
    family, kind = config.get("model_type"), vision.get("model_type")
    # In Qwen2-VL `hidden_size` is the width of the decoder.
    width, layers = _size(vision, where, "embed_dim", "hidden_size"), _size(vision, where, "num_hidden_layers", "depth")
    output = vision.get("out_hidden_size") or (vision["hidden_size"] if "embed_dim" in vision else text_hidden)
    ratio = vision.get("mlp_ratio")
    inner = int(width * ratio) if ratio else _size(vision, where, "intermediate_size")
    patch = _size(vision, where, "patch_size")
    channels = int(vision.get("num_channels") or vision.get("in_channels") or vision.get("in_chans") or 3)
    pixels = channels * patch**2 * int(vision.get("temporal_patch_size") or 1)
    positions = (int(vision.get("image_size") or 0) // patch) ** 2
    merged = width * int(vision.get("spatial_merge_size") or config.get("scale_factor") or 1) ** 2

    attention = [(width, 3 * width), (width, width)] if kind in _FUSED else [(width, width)] * 4
    mlp = [(width, inner)] * (2 if kind in _GATED else 1) + [(inner, width)]
    projector, others = [(merged, output)], [pixels * width, positions * width]
    if family == "llava":
        projector.append((output, output))
    elif kind in _FUSED:
        projector.append((merged, merged))
    elif family == "gemma3":
        projector, others = [], [*others, merged * output]
    if kind == "siglip_vision_model" and vision.get("vision_use_head", True):
        # An attention pools the patches.
        projector += [(width, width), *mlp]
        others.append(3 * width**2)
    return Tower(layers, (*attention, *mlp), tuple(projector), tuple(others))


def _size(vision: Mapping[str, Any], where: str, *keys: str) -> int:
    found = next((vision[key] for key in keys if isinstance(vision.get(key), int)), None)
    if found is None:
        raise ConfigError(
            f"{where}: vision_config has no whole number for {' or '.join(keys)}: a plan needs this size of the vision "
            "tower"
        )
    return int(found)
