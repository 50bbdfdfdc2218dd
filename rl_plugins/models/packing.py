"""Packing of a micro-batch: the samples become one row without padding. Positions start at 0 for each sample.

Given such a row without an attention mask, a model of transformers treats the samples as separate sequences. With the
attention `packed_sdpa`, the model needs no mask for this (a mask would be as large as the square of the row). Some
models do not separate the samples, because a state runs through the row, or because the model makes its own mask. Such
a model is refused.

A row is made on the host and then copied to the device of the model, because a host that reads a length from a GPU
waits until the GPU has no work left. Samples should therefore be on the host.

With `packed_sdpa`, a model also computes a prompt only once for all its samples in the row. The positions of the second
response continue from the end of the prompt (see `packed_attention`).

In some families, the longest sample of a pass sets the rotary frequencies of all samples, packed or padded: `longrope`
(Phi-3), https://arxiv.org/abs/2402.13753, and `dynamic`. Such a sample may only run alone.

Axes: `B` samples, `S` prompt and response with padding, `P` prompt with padding, `T` response tokens with padding, `M`
tokens of the row, `N` real response tokens.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rl_plugins.device_copies import to_device
from rl_plugins.errors import ConfigError
from rl_plugins.models.float8 import plain_products
from rl_plugins.models.packed_attention import boundaries, has_packed_attention
from rl_plugins.vision_language import ModelInputs, SampleImages, has_grid_positions

logger = logging.getLogger(__name__)

_TEST_TOKENS = 4
_LONGROPE = "longrope"


@dataclass(frozen=True)
class _RowSupport:
    """Abilities of a model with packed rows.

    Attributes:
        separates_samples: the outputs of a sample do not depend on the sample before it.
        shares_prompts: the outputs of a sample do not change if its prompt is shared with another sample.
    """

    separates_samples: bool
    shares_prompts: bool


# Cache: the result of the test for each model, without the model engine around the model.
_ROW_SUPPORT: WeakKeyDictionary[nn.Module, _RowSupport] = WeakKeyDictionary()


@dataclass(frozen=True)
class PackedRow:
    """Micro-batch as one row.

    Attributes:
        inputs: arguments of a forward pass of the model, with `input_ids` and `position_ids` [1, M], on its device.
        places_BS: index in the row of each real token, int64, on the device of the samples.
    """

    inputs: ModelInputs
    places_BS: Tensor

    def predicting(self, attention_mask_BS: Tensor, response_width: int) -> Tensor:
        """Return the index in the row of each token that predicts a response token, sample after sample [N]."""
        prompt_width = attention_mask_BS.shape[1] - response_width
        return self.places_BS[:, prompt_width - 1 : -1][attention_mask_BS[:, prompt_width:].bool()]


def pack(
    model: Callable[..., Any],
    *,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    position_ids_BS: Tensor,
    response_width: int | None = None,
    image_inputs_B: Sequence[Mapping[str, Tensor] | None] | None = None,
    device: torch.device | None = None,
) -> PackedRow:
    """Make one row of the real tokens of a micro-batch. Collective.

    Args:
        model: model to run on the row.
        input_ids_BS: ids of prompts, padded on the left, and responses.
        attention_mask_BS: 1 at real tokens, 0 at padding.
        position_ids_BS: positions, counted from 0 at the first real token of a sample.
        response_width: number of response columns, T. If None, the prompts are unknown and cannot be shared.
        image_inputs_B: inputs of the images of each sample; None if no sample has images.
        device: device of the model, by default the device of the samples.

    Raises:
        ConfigError: the model does not separate the samples of a row; or a sample has images, and the model reads text
            alone.
    """
    device, images = device or input_ids_BS.device, SampleImages.of(model, image_inputs_B, input_ids_BS)
    if images is not None:
        position_ids_BS = images.positions(attention_mask_BS, position_ids_BS)
    support, is_token_BS = _row_support(model, device), attention_mask_BS.bool()
    if response_width is None or not support.shares_prompts:
        places_BS = is_token_BS.flatten().cumsum(dim=0).view_as(is_token_BS) - 1
        inputs = _inputs(model, input_ids_BS[is_token_BS], position_ids_BS[..., is_token_BS], device)
        return PackedRow(ModelInputs.of(inputs, images), places_BS)
    width = input_ids_BS.shape[1] - response_width
    first_B = first_of_prompt(input_ids_BS[:, :width], is_token_BS[:, :width], image_inputs_B)
    # All samples of a prompt move to the place of the first sample of the prompt.
    first_B, order_B = first_B.sort(stable=True)
    is_in_row_BS = is_token_BS[order_B]
    is_in_row_BS[:, :width] &= (first_B == order_B)[:, None]
    places_BS = torch.empty_like(input_ids_BS)
    places_BS[order_B] = is_in_row_BS.flatten().cumsum(dim=0).view_as(is_in_row_BS) - 1
    places_BS[order_B, :width] = places_BS[first_B, :width]
    ids_M, positions_M = (
        values_BS[..., order_B, :][..., is_in_row_BS] for values_BS in (input_ids_BS, position_ids_BS)
    )
    shown = images and images.of_samples(order_B[first_B == order_B])
    return PackedRow(ModelInputs.of(_inputs(model, ids_M, positions_M, device), shown), places_BS)


def first_of_prompt(
    prompts_BP: Tensor,
    is_token_BP: Tensor,
    image_inputs_B: Sequence[Mapping[str, Tensor] | None] | None = None,
) -> Tensor:
    """Return for each sample the index of the first sample with the same prompt [B].

    Tokens are compared column by column. The images of two prompts are the same if their inputs are one object.

    Args:
        prompts_BP: ids of prompts.
        is_token_BP: True at real tokens.
        image_inputs_B: inputs of the images of each sample; None if no sample has images.
    """
    nth_B = torch.arange(len(prompts_BP), device=prompts_BP.device)
    if not prompts_BP.numel():
        return nth_B
    prompts_BP = torch.where(is_token_BP, prompts_BP, -1)
    if image_inputs_B is not None:
        numbers: dict[int, int] = {}
        images_B = [numbers.setdefault(id(inputs), len(numbers)) for inputs in image_inputs_B]
        prompts_BP = torch.cat([prompts_BP, prompts_BP.new_tensor(images_B)[:, None]], dim=1)
    numbers_B = prompts_BP.unique(dim=0, return_inverse=True)[1]
    first_B = nth_B.scatter_reduce(0, numbers_B, nth_B, "amin", include_self=False)[numbers_B]
    return first_B


def shares_prompts(model: Callable[..., Any]) -> bool:
    """Return True if a model computes a shared prompt only once. For an untested model, `packed_sdpa` decides."""
    if not has_packed_attention(model):
        return False
    support = _ROW_SUPPORT.get(_without_engine(model))
    return support is None or support.shares_prompts


def _without_engine(model: Callable[..., Any]) -> nn.Module:
    assert isinstance(model, nn.Module), "packed samples need a module"
    inner: nn.Module = getattr(model, "module", model)
    return inner


def _inputs(model: Callable[..., Any], ids_M: Tensor, positions_M: Tensor, device: torch.device) -> dict[str, Any]:
    in_text_M = positions_M if positions_M.ndim == 1 else positions_M[0]
    arguments = boundaries(in_text_M, device) if has_packed_attention(model) else {}
    positions = to_device(positions_M, device).unsqueeze(-2)
    if positions_M.ndim == 1 and has_grid_positions(model):
        # Samples of a row are told apart by the positions in the text, which are the first of the four.
        positions = positions.expand(4, 1, -1)
    return {"input_ids": to_device(ids_M, device)[None], "position_ids": positions, **arguments}


def _row_support(model: Callable[..., Any], device: torch.device) -> _RowSupport:
    inner = _without_engine(model)
    if inner in _ROW_SUPPORT:
        return _ROW_SUPPORT[inner]
    assert isinstance(model, nn.Module)
    support, name = _test_rows(model, device), type(inner).__name__
    if not support.separates_samples:
        raise ConfigError(
            f"{name} with its attention implementation lets packed samples see each other: set packing=False in the "
            "stage (batch.packing=false in a recipe)"
        )
    if has_packed_attention(model) and not support.shares_prompts:
        logger.warning(
            "%s cannot share a prompt among the samples of a row, so the prompt is computed for each sample. The first "
            "micro-batches have more tokens than tokens_per_micro_batch",
            name,
        )
    _ROW_SUPPORT[inner] = support
    return support


def _test_rows(model: nn.Module, device: torch.device) -> _RowSupport:
    ids = torch.arange(_TEST_TOKENS)
    reversed_ids = ids.flip(0)
    half = _TEST_TOKENS // 2

    def outputs(tokens: list[Tensor], positions: list[Tensor], last: int) -> list[Tensor]:
        with _inputs_of_scalar_heads(model) as seen:
            logits = model(**_inputs(model, torch.cat(tokens), torch.cat(positions), device), use_cache=False).logits
        return [output[0, -last:] for output in (logits, *seen)]

    with torch.no_grad(), _without_dropout(model), plain_products(model):
        whole = outputs([reversed_ids, ids], [ids, ids], _TEST_TOKENS)
        if not all(output.isfinite().all() for output in whole):
            raise ConfigError(
                f"{type(_without_engine(model)).__name__} computes outputs that are not finite: a weight is NaN or "
                "infinite, or activations exceed 65,504 in float16 (model.precision=16-mixed): use bf16-mixed"
            )
        after_zeros = outputs([torch.zeros_like(ids), ids], [ids, ids], _TEST_TOKENS)
        if not (separates_samples := _are_close(whole, after_zeros)) or not has_packed_attention(model):
            return _RowSupport(separates_samples, shares_prompts=False)
        shared = outputs([ids[:half], reversed_ids[half:], ids[half:]], [ids, ids[half:]], half)
        # The kernels for rows of another length round differently in every layer.
        shares_prompts = _are_close([output[half:] for output in whole], shared, min_tolerance=1e-2)
        return _RowSupport(separates_samples, shares_prompts)


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        # Without `eval`, because some models merge adapters when `eval` is called.
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _inputs_of_scalar_heads(model: nn.Module) -> Iterator[list[Tensor]]:
    """Record the inputs of scalar heads. The output of a new scalar head is always 0 and shows no difference."""
    seen: list[Tensor] = []
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 1]

    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # The gate of a shared expert also has one output. Its input is a list of tokens, not a row.
        if inputs[0].ndim == 3:
            seen.append(inputs[0])

    hooks = [head.register_forward_pre_hook(record) for head in heads]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _are_close(outputs: list[Tensor], expected: list[Tensor], min_tolerance: float = 0.0) -> bool:
    # With a tolerance: in a mixture of experts, kernels depend on the number of tokens for each expert.
    def is_close(output: Tensor, wanted: Tensor) -> bool:
        tolerance = max(8 * torch.finfo(output.dtype).eps, min_tolerance)
        return bool(((output - wanted).abs() <= tolerance * float(output.abs().max())).all())

    return all(is_close(output, wanted) for output, wanted in zip(outputs, expected, strict=True))


def even_parts(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of `count` parts of about equally many tokens, which may be empty.

    The samples are placed from the longest to the shortest, each into the part with the fewest tokens (LPT, Graham
    1969: the largest part is at most 4/3 of the optimum). A part has its samples in this order.

    Args:
        tokens: number of tokens of each sample.
        count: number of parts.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    smallest_first = [(0, part) for part in range(count)]
    for index in sorted(range(len(tokens)), key=lambda index: -tokens[index]):
        total, part = heapq.heappop(smallest_first)
        parts[part].append(index)
        heapq.heappush(smallest_first, (total + tokens[index], part))
    return parts


# Lengths of samples ---------------------------------------------------------------------------------------------


def check_positions(model: Callable[..., Any], positions: Tensor, option: str | None = None) -> None:
    """Check that no sample of a forward pass changes the rotary frequencies of another sample.

    Args:
        model: model, or a model engine around the model.
        positions: positions of the tokens; without `option`, one row for each sample [B, S].
        option: option of the strategy by which several ranks run one pass; None for a pass of one rank.

    Raises:
        ConfigError: the frequencies depend on the length of a sample, and the sample does not run alone.
    """
    for kind, length in _lengths(getattr(getattr(model, "module", model), "config", None)):
        # The frequencies of `dynamic` also depend on earlier passes.
        is_alone = option is None and len(positions) == 1 and kind == _LONGROPE
        if is_alone or not positions.numel() or int(positions.max()) < length:
            continue
        ways = [f"keep prompt and response within {length} tokens"]
        if option is not None:
            ways.append(f"set {option}=1")
        elif kind == _LONGROPE:
            ways.append(
                f"let longer samples run alone with tokens_per_micro_batch={length} (batch.tokens_per_micro_batch in "
                "a recipe), which the samples of a pair never do"
            )
        raise ConfigError(
            f"{type(getattr(model, 'module', model)).__name__} has the rotary positions {kind}, and a sample of more "
            f"than {length} tokens changes the log-probs of other samples: {', or '.join(ways)}"
        )


def _lengths(config: object) -> Iterator[tuple[str, int]]:
    """Yield kind and length of each set of rotary frequencies; longer samples change the frequencies."""
    if not isinstance(config, PreTrainedConfig):
        return
    text = config.get_text_config()
    rotary: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    # Some families have parameters for each type of layers.
    for parameters in [rotary] if "rope_type" in rotary else rotary.values():
        kind = parameters.get("rope_type") if isinstance(parameters, Mapping) else None
        if kind == _LONGROPE:
            yield kind, parameters["original_max_position_embeddings"]
        elif kind == "dynamic":
            yield kind, text.max_position_embeddings
