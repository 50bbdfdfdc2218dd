"""Sizes of a vision tower and its projector from a config.json, as far as memory and time depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plugins.errors import ConfigError

_GATED_TOWERS = {"qwen2_5_vl", "qwen2_5_vl_vision"}
"""Vision towers with a gated MLP."""
_FUSED_TOWERS = {*_GATED_TOWERS, "qwen2_vl", "qwen2_vl_vision", "qwen3_vl", "qwen3_vl_vision"}
"""Vision towers with one matrix for queries, keys and values."""
_IMAGE_SIZE = 448
"""Width and height of an image in pixels, for a vision tower that takes images of all sizes."""


@dataclass(frozen=True)
class Tower:
    """Sizes of a vision tower and its projector. Biases and norms are left out: less than 1 % of the parameters.

    Attributes:
        layers: number of blocks.
        block: input and output width of each linear layer of a block.
        linear: input and output width of each linear layer outside of blocks.
        others: parameters of each matrix that is no linear layer, such as the embedding of patches.
        width: numbers in the queries of a patch.
        patches: patches of an image, if nothing else is known.
        multiplied: parameters in products of a patch outside of blocks. Of a product of several patches, a patch has
            its share.
        windowed: number of blocks in which a patch attends to the patches of its window alone.
        window: patches of a window.
    """

    layers: int
    block: tuple[tuple[int, int], ...]
    linear: tuple[tuple[int, int], ...]
    others: tuple[int, ...]
    width: int
    patches: int
    multiplied: float
    windowed: int = 0
    window: int = 0

    @property
    def linear_layers(self) -> list[tuple[int, int]]:
        """Input and output width of each linear layer."""
        return [*self.block * self.layers, *self.linear]

    @property
    def matrices(self) -> list[int]:
        """Parameters of each matrix."""
        return [*(before * after for before, after in self.linear_layers), *self.others]

    def forward_flops(self, patches: float) -> float:
        """Return the operations of a forward pass over an image of some patches.

        A patch has two operations for each parameter in its products, and four for each number of its queries and each
        patch to which the patch attends: the formula of the decoder, without a causal mask (PaLM, appendix B,
        https://arxiv.org/abs/2204.02311). Windows: Qwen2.5-VL, section 2.1.1, https://arxiv.org/abs/2502.13923.
        """
        in_blocks = self.layers * sum(before * after for before, after in self.block)
        attended = self.windowed * min(patches, self.window) + (self.layers - self.windowed) * patches
        return patches * (2 * (self.multiplied + in_blocks) + 4 * self.width * attended)

    def adapter(self, rank: int) -> int:
        """Return the parameters of a LoRA adapter of all linear layers."""
        return rank * sum(before + after for before, after in self.linear_layers)


def tower_of(config: Mapping[str, Any], text_hidden: int, where: str) -> Tower | None:
    """Return the vision tower of the model of a config.json; None for a model of text.

    Args:
        config: content of the file.
        text_hidden: width of the decoder.
        where: name of the file for messages.

    Raises:
        ConfigError: a size is missing.
    """
    vision: Mapping[str, Any] | None = config.get("vision_config")
    if vision is None:
        return None
    family, kind = config.get("model_type"), vision.get("model_type")
    # In Qwen2-VL `hidden_size` is the width of the decoder.
    width = _tower_size(vision, where, "embed_dim", "hidden_size")
    layers = _tower_size(vision, where, "num_hidden_layers", "depth")
    output = vision.get("out_hidden_size") or (vision["hidden_size"] if "embed_dim" in vision else text_hidden)
    ratio = vision.get("mlp_ratio")
    inner = int(width * ratio) if ratio else _tower_size(vision, where, "intermediate_size")
    patch = _tower_size(vision, where, "patch_size")
    channels = int(vision.get("num_channels") or vision.get("in_channels") or vision.get("in_chans") or 3)
    pixels = channels * patch**2 * int(vision.get("temporal_patch_size") or 1)
    positions = int(vision.get("num_position_embeddings") or (int(vision.get("image_size") or 0) // patch) ** 2)
    patches = (int(vision.get("image_size") or _IMAGE_SIZE) // patch) ** 2
    merged_patches = int(vision.get("spatial_merge_size") or config.get("scale_factor") or 1) ** 2
    merged = width * merged_patches

    attention = [(width, 3 * width), (width, width)] if kind in _FUSED_TOWERS else [(width, width)] * 4
    mlp = [(width, inner)] * (2 if kind in _GATED_TOWERS else 1) + [(inner, width)]
    projector, others = [(merged, output)], [pixels * width, positions * width]
    if family == "llava":
        projector.append((output, output))
    elif kind in _FUSED_TOWERS:
        projector.append((merged, merged))
    # A projector of its own for each layer of the tower whose output the decoder reads.
    projector *= 1 + len(vision.get("deepstack_visual_indexes") or ())
    multiplied = pixels * width + sum(before * after for before, after in projector) / merged_patches
    if family == "gemma3":
        # The projector multiplies means of patches, and is no linear layer.
        projector, others = [], [*others, merged * output]
        multiplied = width * (pixels + output * int(config.get("mm_tokens_per_image") or patches) / patches)
    if kind == "siglip_vision_model" and vision.get("vision_use_head", True):
        # An attention pools the patches, which have keys and values.
        projector += [(width, width), *mlp]
        others.append(3 * width**2)
        multiplied += 2 * width**2
    windowed = 0
    if kind in _GATED_TOWERS:
        windowed = layers - len({*(vision.get("fullatt_block_indexes") or ())} & {*range(layers)})
    return Tower(
        layers, (*attention, *mlp), tuple(projector), tuple(others),
        width=width,
        patches=patches,
        multiplied=multiplied,
        windowed=windowed,
        window=(int(vision.get("window_size") or 0) // patch) ** 2,
    )  # fmt: skip


def _tower_size(vision: Mapping[str, Any], where: str, *keys: str) -> int:
    found = next((vision[key] for key in keys if isinstance(vision.get(key), int)), None)
    if found is None:
        raise ConfigError(
            f"{where}: vision_config has no whole number for {' or '.join(keys)}: a plan needs this size of the vision "
            "tower"
        )
    return int(found)
