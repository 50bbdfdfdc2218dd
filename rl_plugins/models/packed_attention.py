"""Attention over a row of samples that do not see each other, without a mask and without padding.

Registered with transformers under the name `packed_sdpa`. A model that uses it takes, beside a row, where its samples
begin (`cu_seq_lens_q`, as flash attention does), and each runs through `scaled_dot_product_attention` by itself; those
of one length that stand side by side run together. Without these it is transformers' own `sdpa`.

In a row, samples may share a prompt: it stands there once, before the response of the first of them, and the responses
of the others, whose positions go on from the prompt's, follow. Everything but attention then runs once over the prompt.
Attention takes the row apart into whole samples (`sample_places`) and puts it together again.

Axes: `M` tokens of the row, `F` of all samples as wholes, `D` width of a head, `N` stretches of the row, or samples of
one length `L`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_plugins.errors import ConfigError

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
    # Attention cuts by the lengths on the host, in every layer.
    if not bool(shared_N.any()):
        return _cut_at(own_N.cpu())
    first_N = torch.where(shared_N == 0, torch.arange(len(own_N), device=starts.device), 0).cummax(dim=0).values
    # Samples of one length run together.
    lengths_N, order_N = (shared_N + own_N).sort(stable=True)
    begin_N, own_N, shared_N, prompt_N = (values[order_N] for values in (begin_N, own_N, shared_N, begin_N[first_N]))
    nth_F = torch.arange(int(lengths_N.sum()), device=starts.device)
    nth_F -= (lengths_N.cumsum(dim=0) - lengths_N).repeat_interleave(lengths_N)
    in_prompt_F = nth_F < shared_N.repeat_interleave(lengths_N)
    from_N = torch.stack([begin_N - shared_N, prompt_N])
    from_F, from_prompt_F = from_N.repeat_interleave(lengths_N, dim=1)
    sample_places_F = nth_F + torch.where(in_prompt_F, from_prompt_F, from_F)
    row_places_M = torch.empty_like(positions_M)
    row_places_M[sample_places_F[~in_prompt_F]] = (~in_prompt_F).nonzero().flatten()
    return {**_cut_at(lengths_N.cpu()), "sample_places": sample_places_F, "row_places": row_places_M}


def _cut_at(lengths_N: Tensor) -> dict[str, Any]:
    starts = nn.functional.pad(lengths_N.cumsum(dim=0, dtype=torch.int32), (1, 0))
    longest = int(lengths_N.max())
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


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
    sample_places: Tensor | None = None,
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

    With a `head_exchange` a rank has but a part of the row, in and out. Behind `sample_places` [F] of the row are the
    whole samples that `cu_seq_lens_q` cuts, and at `row_places` [M] of these what goes on in the row.

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
    attending: Any = _Attending(query.shape[1] // key.shape[1], getattr(module, "is_causal", True))
    by_token = [heads.transpose(1, 2)[0] for heads in (query, key, value)]
    if sample_places is not None:
        by_token = [heads_MHD.index_select(0, sample_places) for heads_MHD in by_token]
    runs = [(length, len(list(same))) for length, same in groupby(cu_seq_lens_q.diff().tolist())]
    tokens = [length * count for length, count in runs]
    parts = zip(*(heads_FHD.split(tokens) for heads_FHD in by_token), strict=True)
    outputs = []
    for (length, count), qkv in zip(runs, parts, strict=True):
        q_NHLD, k_NHLD, v_NHLD = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in qkv)
        mask = _window_mask(length, sliding_window, query.device)
        output, _ = sdpa_attention_forward(attending, q_NHLD, k_NHLD, v_NHLD, mask, dropout=dropout, scaling=scaling)
        outputs.append(output.flatten(0, 1))
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


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which tokens of a sample see which [1, 1, L, L]; None if it is all up to themselves."""
    if window is None or length <= window:
        return None
    places_L = torch.arange(length, device=device)
    distance_LL = places_L[:, None] - places_L[None, :]
    return ((distance_LL >= 0) & (distance_LL < window))[None, None]


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, packed_sdpa_mask)
