"""Attention over a row of samples that do not see each other, without a mask and without padding.

Registered with transformers under the name `packed_sdpa`. A model that uses it takes, beside a row, where its samples
begin (`cu_seq_lens_q`, as flash attention does), and each runs through `scaled_dot_product_attention` by itself (or
`product_attention`, where that is faster); those of one length that stand side by side run together. Without these it
is transformers' own `sdpa`.

In a row, samples may share a prompt: it stands there once, before the response of the first of them, and the responses
of the others, whose positions go on from the prompt's, follow. Then everything runs once over the prompt; the tokens of
a stretch of the row attend, and they see those of their whole sample (`cu_seq_lens_k`).

Axes: `M` tokens of the row, `F` of all samples as wholes, `N` stretches of the row, `Q` tokens of a stretch, `K` of its
whole sample, `H` heads of queries, `G` of keys, `D` width of a head.
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


class HeadExchange(Protocol):
    """Ranks that have parts of a row give each other tokens for heads."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All heads of a part [1, heads, P, D]; some of them of the whole row [1, some, M, D]."""

    def to_tokens(self, output: Tensor) -> Tensor:
        """Some heads of the whole row [M, some, D]; all heads of the part [P, heads, D]."""


class _Attending(NamedTuple):
    """What transformers' `sdpa` asks of a layer."""

    num_key_value_groups: int
    is_causal: bool


# Kinds of layers whose mask is known without being told: causal, or causal within a window.
_LAYERS = {"full_attention", "sliding_attention"}


def use_packed_attention(model: nn.Module) -> None:
    """Let a model of transformers run rows by `packed_sdpa`, if it runs by `sdpa`; others keep what they have."""
    if not isinstance(model, PreTrainedModel) or model.config._attn_implementation != "sdpa":
        return
    plain = model.config.get_text_config() is model.config
    layers = set(getattr(model.config, "layer_types", None) or _LAYERS)
    # transformers' own test of whether a family goes through its attention interface; asking for it there would warn.
    if plain and layers <= _LAYERS and model._can_set_attn_implementation():
        model.set_attn_implementation(PACKED_SDPA)


def has_packed_attention(model: Callable[..., Any]) -> bool:
    """Whether a model, or the one in an engine, runs by `packed_sdpa`."""
    config = getattr(getattr(model, "module", model), "config", None)
    return getattr(config, "_attn_implementation", None) == PACKED_SDPA


def boundaries(positions_M: Tensor) -> dict[str, Any]:
    """The arguments that tell a model which tokens of a row are one sample, from their positions in it.

    A stretch of positions that does not begin at 0 goes on behind as many tokens of the last one that does.
    """
    starts = starts_of(positions_M)
    begin_N, own_N = starts[:-1], starts.diff()
    shared_N = positions_M[begin_N]
    if not bool(shared_N.any()):
        return _cut_at(own_N, own_N)
    first_N = torch.where(shared_N == 0, torch.arange(len(own_N), device=starts.device), 0).cummax(dim=0).values
    whole_N = shared_N + own_N
    # Those of one length run together.
    order_N = (whole_N * len(positions_M) + own_N).argsort(stable=True)
    begin_N, own_N, whole_N, shared_N, prompt_N = (
        values[order_N] for values in (begin_N, own_N, whole_N, shared_N, begin_N[first_N])
    )
    query_places_M = _nth(own_N) + begin_N.repeat_interleave(own_N)
    nth_F = _nth(whole_N)
    in_prompt_F = nth_F < shared_N.repeat_interleave(whole_N)
    from_own_F, from_prompt_F = torch.stack([begin_N - shared_N, prompt_N]).repeat_interleave(whole_N, dim=1)
    return {
        **_cut_at(own_N, whole_N),
        "query_places": query_places_M,
        "key_places": nth_F + torch.where(in_prompt_F, from_prompt_F, from_own_F),
        "row_places": query_places_M.argsort(),
    }


def _nth(lengths_N: Tensor) -> Tensor:
    """0, 1, ... of each length, one behind the other."""
    nth = torch.arange(int(lengths_N.sum()), device=lengths_N.device)
    return nth - (lengths_N.cumsum(dim=0) - lengths_N).repeat_interleave(lengths_N)


def _cut_at(own_N: Tensor, whole_N: Tensor) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, lengths_N in (("q", own_N), ("k", whole_N)):
        # Attention cuts by the lengths on the host, in every layer.
        starts = nn.functional.pad(lengths_N.cpu().cumsum(dim=0, dtype=torch.int32), (1, 0))
        arguments |= {f"cu_seq_lens_{name}": starts, f"max_length_{name}": int(lengths_N.max())}
    return arguments


def starts_of(positions_M: Tensor) -> Tensor:
    """Where the stretches of a row begin whose positions go up one by one, and where the last one ends."""
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
    head_exchange: HeadExchange | None = None,
    position_ids: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' models call it: heads [1, heads, M, D] in, [1, M, heads, D] out.

    With a `head_exchange` a rank has but a part of the row, in and out. At `query_places` [M] of the row are the
    stretches that `cu_seq_lens_q` cuts, at `key_places` [F] the whole samples of each, which `cu_seq_lens_k` cuts, and
    at `row_places` [M] of the stretches what goes on in the row.

    Raises:
        ConfigError: a row, and a bias that depends on the distance between its tokens.
    """
    if attention_mask is None and cu_seq_lens_q is None and _may_be_a_row(query, key, position_ids):
        assert position_ids is not None
        starts = starts_of(position_ids[0])
        cu_seq_lens_q = starts if len(starts) > 2 else None
    if cu_seq_lens_q is None:
        others |= {"position_ids": position_ids, "position_bias": position_bias, "sliding_window": sliding_window}
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    if position_bias is not None:
        raise ConfigError(f"{type(module).__name__} adds a bias to its attention: set batch.packing=false")
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
    for (own, whole, count), (of_queries, *of_keys) in zip(runs, parts, strict=True):
        output_NQHD = attend(
            of_queries.unflatten(0, (count, own)), *(heads.unflatten(0, (count, whole)) for heads in of_keys)
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
    """None for a row that holds several samples, whose mask would be M x M; otherwise transformers' `sdpa_mask`."""
    # What transformers asks for when the positions of a row without padding start again.
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


def _may_be_a_row(query: Tensor, key: Tensor, position_ids: Tensor | None) -> bool:
    """Whether it could be one that someone gave with its positions alone, as transformers takes it."""
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
        # As autocast does for the plain function; rotary positions make queries and keys float32 there, values not.
        dtype = torch.get_autocast_dtype(device)
        query_NQHD, key_NKGD, value_NKGD = (heads.to(dtype) for heads in (query_NQHD, key_NKGD, value_NKGD))
    if is_causal and not dropout and suits(query_NQHD):
        return product_attention(query_NQHD, key_NKGD, value_NKGD, scale=scaling, window=window)
    query, key, value = (heads.transpose(1, 2) for heads in (query_NQHD, key_NKGD, value_NKGD))
    (_, heads, own, _), (_, groups, whole, _) = query.shape, key.shape
    mask = None if window is None or whole <= window else _mask(own, whole, window, query.device)
    if own < whole and mask is None:
        # The way to say so that flash attention understands; keys stay as few as they are.
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, causal_lower_right(own, whole), dropout, scale=scaling, enable_gqa=heads > groups
        )
        return output.transpose(1, 2)
    module: Any = _Attending(heads // groups, is_causal)
    return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)[0]


def _mask(own: int, whole: int, window: int, device: torch.device) -> Tensor:
    """Which tokens of a sample its last ones see within a window [1, 1, Q, K]."""
    places_K = torch.arange(whole, device=device)
    distance_QK = places_K[whole - own :, None] - places_K
    return ((distance_QK >= 0) & (distance_QK < window))[None, None]


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, packed_sdpa_mask)
