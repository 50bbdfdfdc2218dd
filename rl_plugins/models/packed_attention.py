"""Attention over a row of separate samples, without a mask and without padding.

The attention is registered with transformers under the name `packed_sdpa`. Beside the row, a model with this attention
gets the starts of the samples (`cu_seq_lens_q`, as for flash attention). Each sample runs through
`scaled_dot_product_attention` by itself, or through `product_attention` where this is faster. Neighbouring samples of
the same length run together. Without the starts, the attention is `sdpa` of transformers.

Samples of a row may share a prompt. The prompt is in the row once, before the response of its first sample. The
responses of the other samples follow, and their positions continue from the end of the prompt. The model then computes
the prompt once. A stretch of the row is a run of consecutive positions: a whole sample, or a response after a shared
prompt. The tokens of a stretch are queries, and the tokens of the stretch's whole sample are keys (`cu_seq_lens_k`).

Axes: `M` tokens of the row, `F` tokens of all whole samples, `N` stretches of the row, `Q` tokens of a stretch, `K`
tokens of its whole sample, `H` heads of queries, `G` heads of keys, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_plugins.errors import ConfigError
from rl_plugins.models.product_attention import product_attention, suits

PACKED_SDPA = "packed_sdpa"


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


def use_packed_attention(model: nn.Module) -> None:
    """Switch a model of transformers from `sdpa` to `packed_sdpa`. A model with any other attention is unchanged."""
    if not isinstance(model, PreTrainedModel) or model.config._attn_implementation != "sdpa":
        return
    has_text_only = model.config.get_text_config() is model.config
    layer_types = set(getattr(model.config, "layer_types", None) or _LAYER_TYPES)
    # transformers' own test for families with its attention interface; a call of the setter alone would warn.
    if has_text_only and layer_types <= _LAYER_TYPES and model._can_set_attn_implementation():
        model.set_attn_implementation(PACKED_SDPA)


def has_packed_attention(model: Callable[..., Any]) -> bool:
    """Return True if a model, or the model inside a model engine, uses `packed_sdpa`."""
    config = getattr(getattr(model, "module", model), "config", None)
    return getattr(config, "_attn_implementation", None) == PACKED_SDPA


def boundaries(positions_M: Tensor) -> dict[str, Any]:
    """Return the arguments of `packed_sdpa` for a row.

    A stretch whose positions start at p > 0 continues after the first p tokens of the last stretch that starts at 0.

    Args:
        positions_M: Position of each token in its sample.
    """
    starts = starts_of(positions_M)
    begin_N, own_N = starts[:-1], starts.diff()
    shared_N = positions_M[begin_N]
    if not bool(shared_N.any()):
        return _cut_at(own_N, own_N)
    first_N = torch.where(shared_N == 0, torch.arange(len(own_N), device=starts.device), 0).cummax(dim=0).values
    whole_N = shared_N + own_N
    # Stretches of the same lengths are sorted next to each other, to run together.
    order_N = (whole_N * len(positions_M) + own_N).argsort(stable=True)
    begin_N, own_N, whole_N, shared_N, prompt_N = (
        values[order_N] for values in (begin_N, own_N, whole_N, shared_N, begin_N[first_N])
    )
    query_places_M = _counts(own_N) + begin_N.repeat_interleave(own_N)
    nth_F = _counts(whole_N)
    in_prompt_F = nth_F < shared_N.repeat_interleave(whole_N)
    from_own_F, from_prompt_F = torch.stack([begin_N - shared_N, prompt_N]).repeat_interleave(whole_N, dim=1)
    return {
        **_cut_at(own_N, whole_N),
        "query_places": query_places_M,
        "key_places": nth_F + torch.where(in_prompt_F, from_prompt_F, from_own_F),
        "row_places": query_places_M.argsort(),
    }


def _counts(lengths_N: Tensor) -> Tensor:
    """Count 0, 1, ... up to each length, and join the counts in one tensor."""
    counts = torch.arange(int(lengths_N.sum()), device=lengths_N.device)
    return counts - (lengths_N.cumsum(dim=0) - lengths_N).repeat_interleave(lengths_N)


def _cut_at(own_N: Tensor, whole_N: Tensor) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, lengths_N in (("q", own_N), ("k", whole_N)):
        # On the host, because attention splits tensors by these lengths in every layer.
        starts = nn.functional.pad(lengths_N.cpu().cumsum(dim=0, dtype=torch.int32), (1, 0))
        arguments |= {f"cu_seq_lens_{name}": starts, f"max_length_{name}": int(lengths_N.max())}
    return arguments


def starts_of(positions_M: Tensor) -> Tensor:
    """Return the start of each stretch of consecutive positions, and the end of the last stretch [N + 1]."""
    begins_M = positions_M.diff(prepend=positions_M[:1]) != 1
    return nn.functional.pad(begins_M.nonzero().flatten(), (0, 1), value=len(positions_M))


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    query_places: Tensor | None = None,
    key_places: Tensor | None = None,
    row_places: Tensor | None = None,
    head_exchange: SequenceParallelExchange | None = None,
    position_ids: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention in the form of transformers: heads [1, heads, M, D] in, [1, M, heads, D] out.

    Args:
        module: Attention layer.
        query: Heads of queries.
        key: Heads of keys.
        value: Heads of values.
        attention_mask: Mask of a padded batch. None for a row.
        cu_seq_lens_q: Boundaries of the stretches, in the order of `query_places`.
        cu_seq_lens_k: Boundaries of the whole samples of the stretches, in the order of `key_places`.
        query_places: Index in the row of each token of the stretches [M].
        key_places: Index in the row of each token of the whole samples [F].
        row_places: Index in the stretches of each token of the row [M].
        head_exchange: Exchange between ranks, if each rank has a part of the row.
        position_ids: Positions of the tokens.
        position_bias: Bias by the distance between tokens.
        sliding_window: Number of tokens in an attention window.
        dropout: Dropout of the attention weights.
        scaling: Factor of the scores.
        **others: Further arguments of transformers, for a padded batch.

    Raises:
        ConfigError: The model adds a bias by the distance between tokens, and the input is a row.
    """
    if attention_mask is None and cu_seq_lens_q is None and _may_be_row(query, key, position_ids):
        assert position_ids is not None
        starts = starts_of(position_ids[0])
        cu_seq_lens_q = starts if len(starts) > 2 else None
    if cu_seq_lens_q is None:
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
    query_MHD, key_FGD, value_FGD = (heads.transpose(1, 2)[0] for heads in (query, key, value))
    if query_places is not None and key_places is not None:
        query_MHD = query_MHD.index_select(0, query_places)
        key_FGD, value_FGD = (heads.index_select(0, key_places) for heads in (key_FGD, value_FGD))
    lengths = cu_seq_lens_q.diff().tolist(), (cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k).diff().tolist()
    runs = [(own, whole, len(list(same))) for (own, whole), same in groupby(zip(*lengths, strict=True))]
    parts = zip(
        query_MHD.split([own * count for own, _, count in runs]),
        key_FGD.split([whole * count for _, whole, count in runs]),
        value_FGD.split([whole * count for _, whole, count in runs]),
        strict=True,
    )
    attend = partial(
        _attend,
        is_causal=bool(getattr(module, "is_causal", True)),
        window=sliding_window,
        dropout=dropout,
        scaling=scaling,
    )
    outputs = []
    for (own, whole, count), (queries, *keys_and_values) in zip(runs, parts, strict=True):
        output_NQHD = attend(
            queries.unflatten(0, (count, own)), *(heads.unflatten(0, (count, whole)) for heads in keys_and_values)
        )
        outputs.append(output_NQHD.flatten(0, 1))
    output_MHD = torch.cat(outputs)
    if row_places is not None:
        output_MHD = output_MHD.index_select(0, row_places)
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
    device = query_NQHD.device.type
    if torch.is_autocast_enabled(device) and query_NQHD.dtype != torch.float64:
        # As autocast does for the function of torch. Rotary positions make queries and keys float32, but not values.
        dtype = torch.get_autocast_dtype(device)
        query_NQHD, key_NKGD, value_NKGD = (heads.to(dtype) for heads in (query_NQHD, key_NKGD, value_NKGD))
    if is_causal and not dropout and suits(query_NQHD):
        return product_attention(query_NQHD, key_NKGD, value_NKGD, scale=scaling, window=window)
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


def _mask(own: int, whole: int, window: int, device: torch.device) -> Tensor:
    """Return the mask of the last tokens of a sample within a window, True at visible tokens [1, 1, Q, K]."""
    places_K = torch.arange(whole, device=device)
    distance_QK = places_K[whole - own :, None] - places_K
    return ((distance_QK >= 0) & (distance_QK < window))[None, None]


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, packed_sdpa_mask)
