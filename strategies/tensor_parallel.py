"""Tensor parallelism: the blocks of a model are cut over a group of ranks, and every rank keeps its own samples.

Stage, data and rollout engine need no change: each rank samples, scores and computes losses of its own samples. The
ranks of a group run one joined batch (`GroupBatch`) only between the input embedding and the last norm of a model. The
embedded samples of all ranks are joined. Every rank runs one part of each block over the joined batch, and then takes
out the hidden states of its own samples. Embeddings and heads run only on a rank's own samples. Therefore the weights
of embeddings and heads are sharded over all ranks, as without tensor parallelism.

The cut of a block is the plan of transformers for the model family (`base_model_tp_plan`), applied by PyTorch:
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html. Source of the cut: Megatron-LM, arXiv 1909.08053.

Axes: `M` tokens of a rank's row, `G` tokens of the group's row, `B` samples, `S` tokens of a sample with padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from rl_plugins.errors import ConfigError
from rl_plugins.models.packed_attention import boundaries
from rl_plugins.models.packing import check_positions
from rl_plugins.strategies.rank_groups import JointPasses, gather_parts, gather_rows, inputs_of_pass, sizes_of
from rl_plugins.vision_language import is_vision_language

_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def cut_over_group(model: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Cut the blocks of a model over the ranks of `mesh`, and join the batches of the ranks.

    Args:
        model: whole model on the device `meta`.
        name: name of the model, for errors.
        mesh: one-dimensional mesh of the group.

    Raises:
        ConfigError: see `plan_of`.
    """
    plan = plan_of(model, name, mesh.size())
    assert isinstance(model, PreTrainedModel)
    parallelize_module(model.base_model, mesh, plan)
    GroupBatch(model, mesh)


def plan_of(model: nn.Module, name: str, size: int) -> dict[str, ParallelStyle]:
    """Return the parallel style of each module of a base model, by module name, for `size` ranks.

    Raises:
        ConfigError: the model is not a transformers model, has no plan, has a plan with an unsupported style, has heads
            or widths that `size` does not divide, or has dropout inside its blocks.
    """
    way_out = f"set tensor_parallel=1, or use another model for the {name}"
    config = getattr(model, "config", None)
    # Images stay with their rank, and their tokens would not.
    described = None if is_vision_language(model) else getattr(config, "base_model_tp_plan", None)
    if not isinstance(model, PreTrainedModel) or not described or model.base_model is model:
        raise ConfigError(f"{type(model).__name__} has no plan for tensor parallelism: {way_out}")
    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        # Norms of single heads: each rank has some of the heads [1, M, heads, head width], so gradients are summed.
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    # Modules outside of blocks (tied embeddings) stay whole.
    in_blocks = {module: style for module, style in described.items() if ".*." in module}
    for module, style in in_blocks.items():
        if style not in styles:
            raise ConfigError(
                f"{type(model).__name__}: tensor parallelism has no style {style!r} for {module}: {way_out}"
            )
    for width in _WIDTHS:
        number = getattr(model.config, width, size)
        if number % size:
            raise ConfigError(
                f"tensor_parallel={size}: the {name} has {width}={number}, which {size} ranks cannot share: {way_out}"
            )
    if any(map(_drops_hidden_states, model.base_model.modules())):
        raise ConfigError(
            f"the {name} has dropout between its blocks, which would differ between the ranks of a group: "
            "set the dropout probability to 0 in config.json, or set tensor_parallel=1"
        )
    return {module: styles[style] for module, style in in_blocks.items()}


def _drops_hidden_states(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    # transformers keeps the probabilities of functional dropout in attributes. Dropout of attention may differ between
    # ranks, because each rank has other heads.
    attributes = {name: value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)}
    return any(value > 0 for name, value in attributes.items() if name != "attention_dropout")


@dataclass
class _Batch:
    """Layout of the joined batch of the current pass: size of each rank's part along the joined axis."""

    axis: int
    sizes: list[int]
    own_ids: Tensor
    left_padding: int


class GroupBatch(JointPasses):
    """Joins the samples of a group's ranks before the blocks of a model, and splits the hidden states after the blocks.

    Rows without padding are joined along the token axis, padded batches along the sample axis. Every rank of the group
    must run the model equally often, which a sharded model requires anyway.

    Args:
        model: model whose base model and input embedding get hooks.
        mesh: one-dimensional mesh of the group.
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
            joined = self._join_rows(ids, positions, cut="stretches" in kwargs)
        else:
            joined = self._join_padded(ids, mask, positions)
        check_positions(base, joined["position_ids"], "tensor_parallel")
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

    def _join_embedded(self, embedding: nn.Module, inputs: tuple[Any, ...], own: Tensor) -> Tensor:
        assert self._batch is not None
        joined: Tensor = _Join.apply(own, self._batch.axis, self._batch.sizes, self._group, self._rank)
        return joined

    def _keep_own(self, base: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        hidden = output.last_hidden_state
        own: Tensor = _KeepOwn.apply(hidden, batch.axis, batch.sizes, self._group, self._rank)
        output.last_hidden_state = own[:, batch.left_padding :]


class _Join(torch.autograd.Function):
    """Concatenates the parts of all ranks.

    The gradient of the joined tensor is equal on all ranks of the group: the gradient of the mean of the group's
    losses. Backward gives a rank's own part the gradient of the rank's own loss.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: int, sizes: list[int], group: ProcessGroup | None, rank: int) -> Tensor:
        ctx.axis, ctx.sizes, ctx.rank = axis, sizes, rank
        return torch.cat(gather_parts(own, axis, sizes, group), dim=axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own = gradient.split(ctx.sizes, dim=ctx.axis)[ctx.rank]
        return own * len(ctx.sizes), None, None, None, None


class _KeepOwn(torch.autograd.Function):
    """Keeps a rank's own part. Backward gives every rank the gradient of the mean of the group's losses."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, axis: int, sizes: list[int], group: ProcessGroup | None, rank: int) -> Tensor:
        ctx.axis, ctx.sizes, ctx.group = axis, sizes, group
        return joined.split(sizes, dim=axis)[rank].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = gather_parts(gradient, ctx.axis, ctx.sizes, ctx.group)
        return torch.cat(parts, dim=ctx.axis) / len(ctx.sizes), None, None, None, None
