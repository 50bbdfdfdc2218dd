"""Sequence parallelism: the tokens of a micro-batch are cut over a group of ranks, for samples too long for one rank.

Every rank keeps its own samples, as with tensor parallelism, and the stage needs no change. Before the body of a model,
the real tokens of all ranks of a group are joined to one row, and each rank takes an equal part of the row. Because all
parts are equal, no rank of a group waits for another rank. Embedding, norms and feed-forward layers run on a part
without a change. Attention exchanges tokens for heads: each rank gets some heads of the whole row and runs
`packed_sdpa`. After the body, each rank gets the hidden states of its own samples.

Source: DeepSpeed-Ulysses, arXiv 2309.14509. (DeepSpeed's implementation requires a data loader with the same samples
for all ranks of a group.)

Axes: `M` tokens of a rank's row, `P` tokens of a rank's part of the group's row, `G` tokens of the group's row, `B`
samples, `S` tokens of a sample with padding, `H` hidden size, `D` width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import has_adapter
from rl_plugins.models.packed_attention import boundaries, has_packed_attention
from rl_plugins.models.packing import check_positions
from rl_plugins.models.remote import local_models
from rl_plugins.strategies.rank_groups import JointPasses, gather_rows, inputs_of_pass
from rl_plugins.vision_language import is_vision_language


def share_sequences(models: Mapping[str, nn.Module], group_size: int) -> list[SequenceShards]:
    """Let groups of neighbouring ranks share the tokens of micro-batches. Call before sharding. Collective."""
    if group_size == 1:
        return []
    group, _ = torch.distributed.new_subgroups(group_size)
    return [SequenceShards(model, name, group) for name, model in local_models(models).items()]


def stop_sharing(sequences: list[SequenceShards]) -> None:
    """Undo `share_sequences`."""
    while sequences:
        sequences.pop().remove()


class SequenceShards(JointPasses):
    """Runs the body of a model on a part of the group's row, and returns the hidden states of the rank's own samples.

    Every rank of the group must run the model equally often, which a sharded model requires anyway.

    Args:
        model: model with whole heads on every rank.
        name: name of the model, for errors.
        group: process group of neighbouring ranks.

    Raises:
        ConfigError: the model's attention is not `packed_sdpa`, the model has no head, or the ranks cannot share the
            attention heads evenly. In a pass: a layer does not exchange tokens for heads, or see `check_positions`.
    """

    def __init__(self, model: nn.Module, name: str, group: ProcessGroup | None) -> None:
        self._group = group
        self._rank, self._size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self._pass: _Pass | None = None
        self._name = name
        body = body_of(model, name, self._size)
        self._hooks = [
            body.register_forward_pre_hook(self._take_part, with_kwargs=True),
            body.register_forward_hook(self._keep_own),
        ]

    def remove(self) -> None:
        """Remove the hooks. The model then runs on the whole rows of this rank."""
        for hook in self._hooks:
            hook.remove()

    def _take_part(
        self, body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = inputs_of_pass(args, kwargs, "sequence parallelism")
        ids_BS, mask_BS, positions_BS = kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids")
        is_token_BS = torch.ones_like(ids_BS).bool() if mask_BS is None else mask_BS.bool()
        if positions_BS is None:
            positions_BS = (is_token_BS.cumsum(dim=1) - 1).clamp(min=0)
        positions_M = positions_BS.expand_as(ids_BS)[is_token_BS]
        rows, ids_G, positions_G = gather_rows(ids_BS[is_token_BS], positions_M, self._group)
        check_positions(body, positions_G, "sequence_parallel")
        slices = [part_of(len(ids_G), rank, self._size) for rank in range(self._size)]
        part, parts = slices[self._rank], [span.stop - span.start for span in slices]
        head_exchange = HeadExchange(parts, self._rank, self._group)
        self._pass = _Pass(is_token_BS, overlaps(parts, rows), head_exchange)
        return (), {
            **kwargs,
            "attention_mask": None,
            "input_ids": ids_G[None, part],
            "position_ids": positions_G[None, part],
            "head_exchange": head_exchange,
            **boundaries(positions_G),
        }

    def _keep_own(self, body: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        current, self._pass = self._pass, None
        assert current is not None and isinstance(body, PreTrainedModel)
        layers, exchanges = body.config.num_hidden_layers, current.head_exchange.calls
        if exchanges < layers:
            raise ConfigError(
                f"{layers - exchanges} of the {layers} layers of {type(body).__name__} see only the tokens of one rank "
                f"under sequence parallelism: {_way_out(self._name)}"
            )
        output.last_hidden_state = current.own(output.last_hidden_state)


@dataclass(frozen=True)
class _Pass:
    """Current pass: real tokens of the own batch [B, S], tokens of each part in each rank's row, and the exchange."""

    is_token_BS: Tensor
    tokens: list[list[int]]
    head_exchange: HeadExchange

    def own(self, part_1PH: Tensor) -> Tensor:
        """Return the hidden states of this rank's samples [B, S, H], 0 at padding."""
        rank = self.head_exchange.rank
        to_each, from_each = self.tokens[rank], [row[rank] for row in self.tokens]
        own_MH = exchange(part_1PH[0], to_each, from_each, self.head_exchange.group)
        if bool(self.is_token_BS.all()):
            return own_MH.view(*self.is_token_BS.shape, -1)
        own_BSH = own_MH.new_zeros(*self.is_token_BS.shape, own_MH.shape[-1])
        own_BSH[self.is_token_BS] = own_MH
        return own_BSH


class HeadExchange:
    """Exchange of tokens for heads, and back, between the ranks of a group; see `packed_sdpa`.

    Not a dataclass: FSDP2 copies dataclasses when it changes the dtype of a pass, and the copy would count the calls.

    Args:
        parts: number of tokens of each rank's part.
        rank: this rank's index in the group.
        group: process group.

    Attributes:
        calls: number of calls of `to_heads`, one for each layer that attends to the whole row.
    """

    def __init__(self, parts: list[int], rank: int, group: ProcessGroup | None) -> None:
        self.parts, self.rank, self.group = parts, rank, group
        self.calls = 0

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange all heads of a rank's part [1, heads, P, D] for some heads of the whole row [1, some, G, D]."""
        self.calls += 1
        size, own = len(self.parts), self.parts[self.rank]
        sent, shapes = [], []
        for heads in (query, key, value):
            if heads.shape[1] < size:
                # Query heads of several ranks share a key head.
                heads = heads.repeat_interleave(size // heads.shape[1], dim=1)
            some = heads.shape[1] // size
            sent.append(heads[0].transpose(0, 1).reshape(own, size, some * heads.shape[-1]))
            shapes.append((some, heads.shape[-1]))
        by_rank = torch.cat(sent, dim=-1).transpose(0, 1).flatten(0, 1)
        joined = exchange(by_rank, [own] * size, self.parts, self.group)
        widths = [some * width for some, width in shapes]
        q, k, v = (
            heads.view(-1, *shape).transpose(0, 1)[None]
            for heads, shape in zip(joined.split(widths, dim=-1), shapes, strict=True)
        )
        return q, k, v

    def to_tokens(self, output: Tensor) -> Tensor:
        """Exchange some heads of the whole row [G, some, D] for all heads of the rank's part [P, heads, D]."""
        size, own = len(self.parts), self.parts[self.rank]
        by_rank = exchange(output, self.parts, [own] * size, self.group)
        return by_rank.view(size, own, *output.shape[1:]).transpose(0, 1).flatten(1, 2)


def body_of(model: nn.Module, name: str, size: int) -> nn.Module:
    """Return the body of a model: all modules except the head.

    Raises:
        ConfigError: see `SequenceShards`.
    """
    whole = model.get_base_model() if has_adapter(model) else model
    can_share = has_packed_attention(whole) and not is_vision_language(whole)
    if not isinstance(whole, PreTrainedModel) or whole.base_model is whole or not can_share:
        raise ConfigError(f"{type(whole).__name__} does not attend by packed_sdpa below a head: {_way_out(name)}")
    heads = whole.config.num_attention_heads
    key_heads = getattr(whole.config, "num_key_value_heads", None) or heads
    if heads % size or (key_heads % size and size % key_heads):
        raise ConfigError(
            f"sequence_parallel={size}: the {name} has num_attention_heads={heads} and "
            f"num_key_value_heads={key_heads}, which {size} ranks cannot share: {_way_out(name)}"
        )
    body: nn.Module = whole.base_model
    return body


def _way_out(name: str) -> str:
    return f"set sequence_parallel=1, or use another model for the {name}"


def overlaps(parts: list[int], rows: list[int]) -> list[list[int]]:
    """Return the number of tokens of each part in each rank's row, for two cuts of the same row [parts, rows]."""
    part_ends, row_ends = (torch.tensor([0, *sizes]).cumsum(dim=0) for sizes in (parts, rows))
    begin = torch.maximum(part_ends[:-1, None], row_ends[None, :-1])
    end = torch.minimum(part_ends[1:, None], row_ends[None, 1:])
    tokens: list[list[int]] = (end - begin).clamp(min=0).tolist()
    return tokens


def part_of(tokens: int, rank: int, size: int) -> slice:
    """Return the slice of a rank's part in a row of `tokens` tokens."""
    return slice(tokens * rank // size, tokens * (rank + 1) // size)


def exchange(values: Tensor, to_each: list[int], from_each: list[int], group: ProcessGroup | None) -> Tensor:
    """Exchange values all-to-all along the first axis. The gradient is exchanged in the other direction. Collective."""
    received: Tensor = _Exchange.apply(values, to_each, from_each, group)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, to_each: list[int], from_each: list[int], group: ProcessGroup | None
    ) -> Tensor:
        ctx.to_each, ctx.from_each, ctx.group = to_each, from_each, group
        return _all_to_all(values, to_each, from_each, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, ctx.from_each, ctx.to_each, ctx.group), None, None, None


def _all_to_all(values: Tensor, to_each: list[int], from_each: list[int], group: ProcessGroup | None) -> Tensor:
    received = values.new_empty(sum(from_each), *values.shape[1:])
    torch.distributed.all_to_all_single(received, values.contiguous(), from_each, to_each, group=group)
    return received
