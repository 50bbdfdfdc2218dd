"""Attention over a row of separate samples, without a mask and without padding.

The attention is registered with transformers under the name `packed_sdpa`. Beside the row, a model with this attention
gets the stretches of the row (`boundaries`). On a GPU, one kernel of torch runs all samples. Without such a kernel,
each sample runs through `scaled_dot_product_attention` by itself, and neighbouring samples of the same length run
together. Without the lengths, the attention is `sdpa` of transformers.

Samples of a row may share a prompt. The prompt is in the row once, before the response of its first sample. The
responses of the other samples follow, and their positions continue from the end of the prompt. The model then computes
the prompt once. A stretch of the row is a run of consecutive positions: a whole sample, or a response after a shared
prompt. The tokens of a stretch are queries, and the tokens of the stretch's whole sample are keys.

Axes: `M` tokens of the row, `F` tokens of all whole samples, `N` stretches of the row, `Q` tokens of a stretch, `K`
tokens of its whole sample, `H` heads of queries, `G` heads of keys, `D` width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_plugins.device_copies import to_device
from rl_plugins.errors import ConfigError

PACKED_SDPA = "packed_sdpa"

# Bounds of `varlen_attn`: Ampere, and the widest head.
_CAPABILITY, _WIDTH = (8, 0), 256

# Stretches -----------------------------------------------------------------------------------------------------


class _Places(NamedTuple):
    """Places of the tokens in a row with shared prompts.

    Attributes:
        queries: index in the row of each token of the stretches [M].
        keys: index in the row of each token of the whole samples [F].
        row: index in the stretches of each token of the row [M].
    """

    queries: Tensor
    keys: Tensor
    row: Tensor


@dataclass(frozen=True)
class Stretches:
    """Stretches of a row, made once for a forward pass, so that no layer waits for the GPU to read a length.

    Attributes:
        runs: number of queries of a stretch, number of keys, and number of neighbouring stretches with these numbers.
        starts: starts of the stretches among queries and among keys, and the ends of the last stretch, int32 on the
            row's device [N + 1].
        places: places of queries and keys. None if every stretch is a whole sample, in the order of the row.
    """

    runs: tuple[tuple[int, int, int], ...]
    starts: tuple[Tensor, Tensor]
    places: _Places | None = None

    @classmethod
    def of_lengths(
        cls, own_N: Tensor, whole_N: Tensor, device: torch.device, places: _Places | None = None
    ) -> Stretches:
        """Make the record of stretches with `own_N` queries and `whole_N` keys (on the host) for a row on a device."""
        pairs = torch.stack([own_N, whole_N], dim=1).tolist()
        runs = tuple((own, whole, len(list(same))) for (own, whole), same in groupby(pairs))
        of_own, of_whole = (
            to_device(nn.functional.pad(lengths_N.cumsum(0, dtype=torch.int32), (1, 0)), device)
            for lengths_N in (own_N, whole_N)
        )
        return cls(runs, (of_own, of_whole), places)

    @property
    def longest(self) -> tuple[int, int]:
        """Largest numbers of queries and of keys of a stretch."""
        return max(own for own, _, _ in self.runs), max(whole for _, whole, _ in self.runs)


def boundaries(positions_M: Tensor, device: torch.device | None = None) -> dict[str, Stretches]:
    """Return the argument of `packed_sdpa` for a row.

    A stretch whose positions start at p > 0 continues after the first p tokens of the last stretch that starts at 0.

    Args:
        positions_M: position of each token in its sample. Positions on a GPU are copied to the host, with one wait.
        device: device of the row, by default the device of the positions.
    """
    device, positions_M = device or positions_M.device, positions_M.cpu()
    starts = starts_of(positions_M)
    begin_N, own_N = starts[:-1], starts.diff()
    shared_N = positions_M[begin_N]
    if not bool(shared_N.any()):
        return {"stretches": Stretches.of_lengths(own_N, own_N, device)}
    first_N = torch.where(shared_N == 0, torch.arange(len(own_N)), 0).cummax(dim=0).values
    whole_N = shared_N + own_N
    # Stretches of the same lengths are sorted next to each other, to run together.
    order_N = (whole_N * len(positions_M) + own_N).argsort(stable=True)
    begin_N, own_N, whole_N, shared_N, prompt_N = (
        values[order_N] for values in (begin_N, own_N, whole_N, shared_N, begin_N[first_N])
    )
    queries_M = _counts(own_N) + begin_N.repeat_interleave(own_N)
    nth_F = _counts(whole_N)
    in_prompt_F = nth_F < shared_N.repeat_interleave(whole_N)
    from_own_F, from_prompt_F = torch.stack([begin_N - shared_N, prompt_N]).repeat_interleave(whole_N, dim=1)
    keys_F = nth_F + torch.where(in_prompt_F, from_prompt_F, from_own_F)
    row_M = torch.empty_like(queries_M).scatter_(0, queries_M, torch.arange(len(queries_M)))
    places = _Places(*(to_device(indices, device) for indices in (queries_M, keys_F, row_M)))
    return {"stretches": Stretches.of_lengths(own_N, whole_N, device, places)}


def _counts(lengths_N: Tensor) -> Tensor:
    """Count 0, 1, ... up to each length, and join the counts in one tensor."""
    counts = torch.arange(int(lengths_N.sum()))
    return counts - (lengths_N.cumsum(dim=0) - lengths_N).repeat_interleave(lengths_N)


def starts_of(positions_M: Tensor) -> Tensor:
    """Return the start of each stretch of consecutive positions, and the end of the last stretch [N + 1]."""
    begins_M = positions_M.diff(prepend=positions_M[:1]) != 1
    return nn.functional.pad(begins_M.nonzero().flatten(), (0, 1), value=len(positions_M))


# Attention -----------------------------------------------------------------------------------------------------


class SequenceParallelExchange(Protocol):
    """Exchange of tokens for heads between the ranks of sequence parallelism. Each rank has a part of the row."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn all heads of the rank's part [1, heads, P, D] into some heads of the whole row [1, some, M, D]."""

    def to_tokens(self, output: Tensor) -> Tensor:
        """Turn some heads of the whole row [M, some, D] into all heads of the rank's part [P, heads, D]."""


class _SdpaLayer(NamedTuple):
    """Attributes of a layer that `sdpa` of transformers reads."""

    num_key_value_groups: int
    is_causal: bool


# Layer types with a mask that needs no further information: causal, or causal within a window.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Families whose attention layers add numbers to the mask.
_OWN_MASKS = {"doge"}


def use_packed_attention(model: nn.Module) -> None:
    """Switch a model of transformers from `sdpa` to `packed_sdpa`. A model with any other attention is unchanged.

    Models whose mask has more than the attention function is told keep `sdpa`: the function gets no mask for a row.
    """
    if not isinstance(model, PreTrainedModel) or model.config._attn_implementation != "sdpa":
        return
    text = model.config.get_text_config()
    # The tokens of an image see each other in these models.
    is_bidirectional = getattr(text, "use_bidirectional_attention", None) or (
        "token_type_ids" in inspect.signature(model.forward).parameters
    )
    if text is not model.config and is_bidirectional:
        return
    layer_types = set(getattr(text, "layer_types", None) or _LAYER_TYPES)
    # transformers' own test for families with its attention interface; a call of the setter alone would warn.
    if not layer_types <= _LAYER_TYPES or text.model_type in _OWN_MASKS or not model._can_set_attn_implementation():
        return
    if not _has_window_in_mask_alone(model):
        model.set_attn_implementation(PACKED_SDPA if text is model.config else {"text_config": PACKED_SDPA})


def _has_window_in_mask_alone(model: PreTrainedModel) -> bool:
    """Return True if layers have a window of attention, and do not hand the window over to the attention function."""
    text = model.config.get_text_config()
    layer_types = getattr(text, "layer_types", None) or ["sliding_attention"]
    if not getattr(text, "sliding_window", None) or "sliding_attention" not in layer_types:
        return False
    decoder: nn.Module = model.get_decoder()
    forwards = {type(layer).forward for layer in decoder.modules() if inspect.isfunction(type(layer).forward)}
    try:
        calls = [source for source in map(inspect.getsource, forwards) if "ALL_ATTENTION_FUNCTIONS" in source]
    except OSError:
        # Without its source, a class may do anything.
        return True
    return not all("sliding_window=" in call for call in calls)


def has_packed_attention(model: Callable[..., Any]) -> bool:
    """Return True if a model, or the model inside a model engine, uses `packed_sdpa`."""
    config: Any = getattr(getattr(model, "module", model), "config", None)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    return getattr(text, "_attn_implementation", None) == PACKED_SDPA


# `torch.compile` would compile attention again for other lengths.
@torch.compiler.disable
def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stretches: Stretches | None = None,
    head_exchange: SequenceParallelExchange | None = None,
    position_ids: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention in the form of transformers: heads [1, heads, M, D] in, [1, M, heads, D] out.

    Args:
        module: attention layer.
        query: heads of queries.
        key: heads of keys.
        value: heads of values.
        attention_mask: mask of a padded batch. None for a row.
        stretches: stretches of a row.
        head_exchange: exchange between ranks, if each rank has a part of the row.
        position_ids: positions of the tokens.
        position_bias: bias by the distance between tokens.
        sliding_window: number of tokens in an attention window.
        dropout: dropout of the attention weights.
        scaling: factor of the scores.
        softcap: soft cap of the scores, `softcap * tanh(scores / softcap)`, as in Gemma 2. The scores of a sample are
            then in memory.
        **others: further arguments of transformers, for a padded batch.

    Raises:
        ConfigError: the model adds a bias by the distance between tokens, and the input is a row.
    """
    if attention_mask is None and stretches is None and _may_be_row(query, key, position_ids):
        assert position_ids is not None
        lengths_N = starts_of(position_ids[0].cpu()).diff()
        stretches = Stretches.of_lengths(lengths_N, lengths_N, query.device) if len(lengths_N) > 1 else None
    if stretches is None and softcap is not None:
        # The function of transformers ignores the soft cap.
        return capped_attention(query, key, value, attention_mask, softcap, dropout=dropout, scaling=scaling), None
    if stretches is None:
        others |= {"position_ids": position_ids, "position_bias": position_bias, "sliding_window": sliding_window}
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    if position_bias is not None:
        raise ConfigError(
            f"{type(module).__name__} adds a bias to its attention, so rows cannot be packed: set packing=False "
            "in the stage (batch.packing=false in a recipe)"
        )
    if head_exchange is not None:
        query, key, value = head_exchange.to_heads(query, key, value)
    query_MHD, key_FGD, value_FGD = (heads.transpose(1, 2)[0] for heads in _as_autocast_does(query, key, value))
    places = stretches.places
    if places is not None:
        query_MHD = query_MHD.index_select(0, places.queries)
        key_FGD, value_FGD = (heads.index_select(0, places.keys) for heads in (key_FGD, value_FGD))
    is_causal = bool(getattr(module, "is_causal", True))
    if softcap is not None:
        attend = partial(_attend_capped, softcap=softcap, window=sliding_window, dropout=dropout, scaling=scaling)
        output_MHD = _attend_run_by_run(query_MHD, key_FGD, value_FGD, stretches, attend)
    elif is_causal and not dropout and has_kernel(query_MHD, value_FGD):
        output_MHD = attend_at_once(query_MHD, key_FGD, value_FGD, stretches, sliding_window, scaling)
    else:
        attend = partial(_attend, is_causal=is_causal, window=sliding_window, dropout=dropout, scaling=scaling)
        output_MHD = _attend_run_by_run(query_MHD, key_FGD, value_FGD, stretches, attend)
    if places is not None:
        output_MHD = output_MHD.index_select(0, places.row)
    return (output_MHD if head_exchange is None else head_exchange.to_tokens(output_MHD))[None], None


def packed_sdpa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **others: Any,
) -> Tensor | None:
    """Return None for a row of several samples (a mask would be M x M), and `sdpa_mask` of transformers otherwise."""
    # transformers calls with these arguments when the positions of a row without padding start again.
    is_row = attention_mask is None and batch_size == 1 and q_length == kv_length
    if is_row and not (allow_is_causal_skip or allow_is_bidirectional_skip or use_vmap):
        return None
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        **others,
    )


def _may_be_row(query: Tensor, key: Tensor, position_ids: Tensor | None) -> bool:
    # transformers accepts a row with positions and no other information.
    is_whole = query.shape[0] == 1 and query.shape[2] == key.shape[2]
    return is_whole and position_ids is not None and position_ids.ndim == 2


def _as_autocast_does(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast heads like the function of torch. Rotary positions make queries and keys float32, but not values."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(heads.to(torch.get_autocast_dtype(device)) for heads in tensors)


def has_kernel(query_MHD: Tensor, value_FGD: Tensor) -> bool:
    """Return True if `varlen_attn` runs such heads: 16 bits, on a GPU from Ampere on, with a width that it knows."""
    device, width = query_MHD.device, query_MHD.shape[-1]
    return (
        device.type == "cuda"
        and query_MHD.dtype in (torch.bfloat16, torch.float16)
        and width == value_FGD.shape[-1]
        and width % 8 == 0
        and width <= _WIDTH
        and torch.cuda.get_device_capability(device) >= _CAPABILITY
    )


def attend_at_once(
    query_MHD: Tensor, key_FGD: Tensor, value_FGD: Tensor, stretches: Stretches, window: int | None, scale: float | None
) -> Tensor:
    """Compute causal attention of all stretches in one kernel [M, H, D], without waiting for the GPU."""
    # The kernel counts the tokens before a query, and -1 is all of them.
    before = -1 if window is None else window - 1
    output_MHD = varlen_attn(
        query_MHD,
        key_FGD,
        value_FGD,
        *stretches.starts,
        *stretches.longest,
        scale=scale,
        window_size=(before, 0),
        enable_gqa=query_MHD.shape[1] != key_FGD.shape[1],
    )
    # A pair only with `return_aux`.
    assert isinstance(output_MHD, Tensor)
    return output_MHD


def _attend_run_by_run(
    query_MHD: Tensor, key_FGD: Tensor, value_FGD: Tensor, stretches: Stretches, attend: Callable[..., Tensor]
) -> Tensor:
    runs = stretches.runs
    parts = zip(
        query_MHD.split([own * count for own, _, count in runs]),
        key_FGD.split([whole * count for _, whole, count in runs]),
        value_FGD.split([whole * count for _, whole, count in runs]),
        strict=True,
    )
    outputs = []
    for (own, whole, count), (queries, *keys_and_values) in zip(runs, parts, strict=True):
        output_NQHD = attend(
            queries.unflatten(0, (count, own)), *(heads.unflatten(0, (count, whole)) for heads in keys_and_values)
        )
        outputs.append(output_NQHD.flatten(0, 1))
    return torch.cat(outputs)


def _attend(
    query_NQHD: Tensor,
    key_NKGD: Tensor,
    value_NKGD: Tensor,
    *,
    is_causal: bool,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    query, key, value = (heads.transpose(1, 2) for heads in (query_NQHD, key_NKGD, value_NKGD))
    (_, heads, own, _), (_, groups, whole, _) = query.shape, key.shape
    mask = None if window is None or whole <= window else _mask(own, whole, window, query.device)
    if own < whole and mask is None:
        # This form of the causal mask allows flash attention, and keys are not repeated for the heads of queries.
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, causal_lower_right(own, whole), dropout, scale=scaling, enable_gqa=heads > groups
        )
        return output.transpose(1, 2)
    module: Any = _SdpaLayer(heads // groups, is_causal)
    return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)[0]


def _attend_capped(
    query_NQHD: Tensor,
    key_NKGD: Tensor,
    value_NKGD: Tensor,
    *,
    softcap: float,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    own, whole = query_NQHD.shape[1], key_NKGD.shape[1]
    mask = _mask(own, whole, whole if window is None else window, query_NQHD.device)
    query, key, value = (heads.transpose(1, 2) for heads in (query_NQHD, key_NKGD, value_NKGD))
    return capped_attention(query, key, value, mask, softcap, dropout=dropout, scaling=scaling)


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> Tensor:
    """Compute causal attention with soft-capped scores: heads [N, heads, tokens, D] in, [N, Q, H, D] out.

    Source: Gemma 2, https://arxiv.org/abs/2408.00118, section 2.

    Args:
        query: heads of queries of the last Q tokens.
        key: heads of keys of K tokens; each serves equally many heads of queries.
        value: heads of values.
        mask: True at visible keys, in a shape that fits [N, H, Q, K]; None for all earlier tokens.
        softcap: bound of the scores.
        dropout: dropout of the attention weights.
        scaling: factor of the scores, by default one over the square root of D.
    """
    (_, heads, own, width), (_, groups, whole, _) = query.shape, key.shape
    key, value = (shared.repeat_interleave(heads // groups, dim=1) for shared in (key, value))
    scores = query @ key.mT * (width**-0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    visible = _mask(own, whole, whole, query.device) if mask is None else mask
    # A token of the padding sees nothing, and its weights must be finite.
    scores = scores.masked_fill(~visible[..., :whole], torch.finfo(scores.dtype).min)
    accumulates_in = torch.promote_types(scores.dtype, torch.float32)
    weights = nn.functional.dropout(scores.softmax(dim=-1, dtype=accumulates_in).to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2)


def _mask(own: int, whole: int, window: int, device: torch.device) -> Tensor:
    """Return the mask of the last tokens of a sample within a window, True at visible tokens [1, 1, Q, K]."""
    places_K = torch.arange(whole, device=device)
    distance_QK = places_K[whole - own :, None] - places_K
    return ((distance_QK >= 0) & (distance_QK < window))[None, None]


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, packed_sdpa_mask)
