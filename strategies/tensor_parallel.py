"""Blocks of a model cut over a group of ranks (tensor parallelism), while every rank keeps samples of its own.

A stage, its data and the rollout engine know nothing of it: each rank samples, scores and takes losses of its own
samples. Only between the input embedding and the last norm of a model do the ranks of a group run one batch, that of
all of them (`GroupBatch`): what each has embedded is joined, every rank runs its part of each block over the whole,
and takes the hidden states of its own samples out again. Embeddings and heads see nothing but a rank's own samples, so
their weights are sharded over all ranks as if there were no groups.

How a block is cut is transformers' plan of its family (`base_model_tp_plan`), carried out by PyTorch:
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html. Source of the cut: Megatron-LM, arXiv 1909.08053.

Axes: `M` tokens of a rank's row, `G` of the group's, `B` samples, `S` their tokens with padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from rl_plugins.errors import ConfigError
from rl_plugins.models.packed_attention import boundaries
from rl_plugins.strategies.gathering import gather_parts, gather_rows, inputs_of_pass, sizes_of

_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def cut_over_group(model: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Cut the blocks of a model over the ranks of `mesh`, and let them run one batch; once.

    Args:
        model: with whole weights, the same on every rank.
        name: of the engine, for errors.
        mesh: one-dimensional.

    Raises:
        ConfigError: see `plan_of`.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return
    plan = plan_of(model, name, mesh.size())
    assert isinstance(model, PreTrainedModel)
    parallelize_module(model.base_model, mesh, plan)
    GroupBatch(model, mesh)


def plan_of(model: nn.Module, name: str, size: int) -> dict[str, ParallelStyle]:
    """How the modules of a base model are cut over `size` ranks, by their names.

    Raises:
        ConfigError: the model is not of transformers, has no plan, a plan with parts that are not known here, heads or
            widths that the ranks cannot share evenly, or dropout inside its blocks.
    """
    way_out = f"set strategy.tensor_parallel=1, or use another model for the {name}"
    described = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not isinstance(model, PreTrainedModel) or not described or model.base_model is model:
        raise ConfigError(f"{type(model).__name__} has no plan for tensor parallelism: {way_out}")
    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        # Norms of single heads: each rank has some of the heads [1, M, heads, head width], so gradients are added up.
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    # What is in no block, tied embeddings, stays whole.
    in_blocks = {module: style for module, style in described.items() if ".*." in module}
    for module, style in in_blocks.items():
        if style not in styles:
            raise ConfigError(f"{type(model).__name__} wants {module} cut as {style!r}, which is not built: {way_out}")
    for width in _WIDTHS:
        number = getattr(model.config, width, size)
        if number % size:
            raise ConfigError(
                f"strategy.tensor_parallel={size}: the {name} has {width}={number}, which {size} ranks cannot share"
            )
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.base_model.modules()):
        raise ConfigError(
            f"the {name} has dropout between its blocks, which would differ over the ranks that run them together: "
            "set its probability to 0 in config.json, or strategy.tensor_parallel=1"
        )
    return {module: styles[style] for module, style in in_blocks.items()}


@dataclass
class _Batch:
    """The batch that a group runs at the moment: whose part is where, along which axis."""

    axis: int
    sizes: list[int]
    own_ids: Tensor
    left_padding: int


class GroupBatch:
    """Joins the samples of a group's ranks before the blocks of a model, and gives each rank its own behind them.

    Rows without padding are joined end to end; padded batches one below the other. Every rank of the group must run the
    model equally often, as all ranks of an engine in shards must anyway.

    Args:
        model: its base model is hooked, and its input embedding.
        mesh: one-dimensional, the group.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._rank, self._size = mesh.get_local_rank(), mesh.size()
        self._batch: _Batch | None = None
        embedding = model.get_input_embeddings()
        model.base_model.register_forward_pre_hook(self._join_inputs, with_kwargs=True)
        embedding.register_forward_pre_hook(self._embed_own)
        embedding.register_forward_hook(self._join_embedded)
        model.base_model.register_forward_hook(self._keep_own)

    def _join_inputs(
        self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = inputs_of_pass(args, kwargs, "tensor parallelism")
        ids, mask, positions = kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is None and positions is not None and len(ids) == 1:
            joined = self._join_rows(ids, positions, cut="cu_seq_lens_q" in kwargs)
        else:
            joined = self._join_padded(ids, mask, positions)
        return (), {**kwargs, **joined}

    def _join_rows(self, ids_1M: Tensor, positions_1M: Tensor, *, cut: bool) -> dict[str, Any]:
        sizes, ids_G, positions_G = gather_rows(ids_1M[0], positions_1M[0], self._group)
        self._batch = _Batch(1, sizes, ids_1M, 0)
        row = {"input_ids": ids_G[None], "position_ids": positions_G[None]}
        return {**row, **boundaries(positions_G)} if cut else row

    def _join_padded(self, ids_BS: Tensor, mask_BS: Tensor | None, positions_BS: Tensor | None) -> dict[str, Any]:
        if mask_BS is None:
            mask_BS = torch.ones_like(ids_BS)
        if positions_BS is None:
            positions_BS = (mask_BS.cumsum(dim=1) - 1).clamp(min=0)
        padding = max(sizes_of(ids_BS.T, self._group)) - ids_BS.shape[1]
        inputs_BS3 = torch.stack([ids_BS, mask_BS.long(), positions_BS.expand_as(ids_BS)], dim=-1)
        padded_BS3 = nn.functional.pad(inputs_BS3, (0, 0, padding, 0))
        sizes = sizes_of(padded_BS3, self._group)
        self._batch = _Batch(0, sizes, padded_BS3[..., 0], padding)
        joined = torch.cat(gather_parts(padded_BS3, 0, sizes, self._group)).unbind(dim=-1)
        return dict(zip(("input_ids", "attention_mask", "position_ids"), joined, strict=True))

    def _embed_own(self, embedding: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        assert self._batch is not None, "the input embedding runs inside its model"
        return (self._batch.own_ids,)

    def _join_embedded(self, embedding: nn.Module, inputs: Any, own: Tensor) -> Tensor:
        assert self._batch is not None
        joined: Tensor = _Join.apply(own, self._batch.axis, self._batch.sizes, self._group, self._rank)
        return joined

    def _keep_own(self, base: nn.Module, inputs: Any, output: Any) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        hidden = output.last_hidden_state
        own: Tensor = _KeepOwn.apply(hidden, batch.axis, batch.sizes, self._group, self._rank)
        output.last_hidden_state = own[:, batch.left_padding :]


class _Join(torch.autograd.Function):
    """The parts of all ranks, one behind the other.

    Behind it, all ranks of the group have the same gradient: that of the mean over the group of their losses. A rank's
    own part has its gradient from its own loss alone.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: int, sizes: list[int], group: Any, rank: int) -> Tensor:
        ctx.axis, ctx.sizes, ctx.rank = axis, sizes, rank
        return torch.cat(gather_parts(own, axis, sizes, group), dim=axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own = gradient.split(ctx.sizes, dim=ctx.axis)[ctx.rank]
        return own * len(ctx.sizes), None, None, None, None


class _KeepOwn(torch.autograd.Function):
    """A rank's own part; backward gives every rank the gradient of the mean of the group's losses."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, axis: int, sizes: list[int], group: Any, rank: int) -> Tensor:
        ctx.axis, ctx.sizes, ctx.group = axis, sizes, group
        return joined.split(sizes, dim=axis)[rank].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        everyones = gather_parts(gradient, ctx.axis, ctx.sizes, ctx.group)
        return torch.cat(everyones, dim=ctx.axis) / len(ctx.sizes), None, None, None, None
