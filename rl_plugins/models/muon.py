"""Muon for the matrices of hidden layers, with AdamW for all other parameters; matrices may be sharded over ranks.

Momentum, weight decay and the change of weights are element by element: each rank computes its shards. Only the
orthogonalisation (Newton-Schulz) needs whole matrices. So the matrices are divided over the ranks. All ranks send their
shards of the updates to the owners of the matrices (all-to-all). The owner of a matrix orthogonalises the update, and
sends each rank its shard of the result. Ranks that share the shards of a model orthogonalise no matrix twice, and a
step of many matrices needs two collectives. Updates travel in bfloat16, the dtype of the orthogonalisation. Float32
weights get the bits of a step of whole matrices.

Matrices that tensor parallelism and FSDP2 have cut travel twice in each direction: in the group of each cut.

Sources: Muon, https://kellerjordan.github.io/posts/muon/; the learning rate shared with AdamW (`match_rms_adamw`), Muon
is Scalable for LLM Training, section 2.2, https://arxiv.org/abs/2502.16982; owners of matrices and all-to-all,
https://github.com/microsoft/dion.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from typing_extensions import override

from rl_plugins.weights.source import device_of

ELEMENTS_AT_ONCE = 2**26
"""Elements of the matrices that a rank owns in one exchange: up to 128 MiB in bfloat16, or one larger matrix."""


class MuonAndAdamW(Optimizer):
    """Takes steps of Muon on the matrices of a model's hidden layers, and steps of AdamW on the other parameters.

    The other parameters are embeddings, output heads, biases, weights of norms, and the experts of a mixture, which are
    stacks of matrices. Parameters are whole or DTensors: ZeRO, which cuts all parameters into flat pieces, cannot shard
    this optimizer.

    Args:
        model: model to train, whose parameters with `requires_grad` are trained.
        lr: learning rate of both.
        betas: decay rates of AdamW.
        weight_decay: weight decay of both.
        eps: number added to the denominator of AdamW.
        momentum: momentum of Muon.
        nesterov: use Nesterov's momentum in Muon.
        ns_steps: Newton-Schulz steps of Muon.
        adjust_lr_fn: scale of Muon's rate. `match_rms_adamw` makes changes as large as those of AdamW, so both have one
            rate; `original` is Keller Jordan's, for larger rates.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        matrices, others = split_parameters(model)
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._rules: list[Optimizer] = []
        if matrices:
            rates = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
            self._rules.append(ShardedMuon(matrices, **shared | rates))
        if others:
            self._rules.append(AdamW(others, **shared, betas=betas, eps=eps, fused=True))
        super().__init__([group for rule in self._rules for group in rule.param_groups], shared)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            # Lightning computes gradients in the closure, if a stage has not.
            loss = None if closure is None else closure()
        for rule, group in zip(self._rules, self.param_groups, strict=True):
            # Loading a checkpoint replaces groups and state.
            rule.param_groups, rule.state = [group], self.state
            rule.step()
        return loss


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained matrices of the hidden layers, and the other trained parameters."""
    heads = {id(parameter) for module in _ends(model) for parameter in module.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_matrix = [parameter.ndim == 2 and id(parameter) not in heads for parameter in trained]
    matrices = [parameter for parameter, chosen in zip(trained, is_matrix, strict=True) if chosen]
    return matrices, [parameter for parameter, chosen in zip(trained, is_matrix, strict=True) if not chosen]


def _ends(model: nn.Module) -> list[nn.Module]:
    """Return embeddings, the output head, and scalar heads."""
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    ends: list[nn.Module] = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and module.out_features == 1)
    ]
    return ends if head is None else [*ends, head]


class ShardedMuon(Muon):
    """`torch.optim.Muon` with few collectives for DTensors; arguments and states are the same.

    All ranks must step with the same parameters. Updates are orthogonalised on the device of the parameter's mesh, also
    if the shards are in host memory.
    """

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            sharded_alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    sharded_alike[_sharding_of(parameter)].append(parameter)
            for parameters in sharded_alike.values():
                cuts = cuts_of(parameters[0])
                for some in _rounds(parameters, math.prod(cut.size for cut in cuts)):
                    self._step_of(some, cuts, group)
        return loss

    def _step_of(self, parameters: list[nn.Parameter], cuts: list[Cut], group: dict[str, Any]) -> None:
        """Step parameters that are cut alike. Collective."""

        def orthogonalize(matrix: Tensor) -> Tensor:
            return _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

        rate, rule = float(group["lr"]), group["adjust_lr_fn"]
        updates = [self._update_of(parameter, group) for parameter in parameters]
        changes = on_owners(orthogonalize, updates, [parameter.shape for parameter in parameters], cuts)
        for parameter, change in zip(parameters, changes, strict=True):
            weights = _own_part(parameter)
            weights.mul_(1 - rate * group["weight_decay"])
            weights.add_(change.to(weights.device), alpha=-_adjust_lr(rate, rule, parameter.shape))

    def _update_of(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum; return this rank's part of the update in bfloat16, on the device of collectives."""
        assert parameter.grad is not None and _sharding_of(parameter.grad) == _sharding_of(parameter)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        gradient, momentum = _own_part(parameter.grad), _own_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        device = device_of(parameter.device_mesh) if isinstance(parameter, DTensor) else parameter.device
        # The orthogonalisation scales a matrix of bfloat16 in place, and must not change the momentum.
        return update.to(device, torch.bfloat16, copy=True)


class Cut(NamedTuple):
    """A cut of matrices over the ranks of a group, with the sizes of `torch.chunk`.

    Attributes:
        group: ranks that have a part each.
        axis: axis of the matrices that is cut.
    """

    group: ProcessGroup
    axis: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return dist.get_rank(self.group)

    def shapes(self, shape: Sequence[int]) -> list[list[int]]:
        """Return the shape of the part of each rank."""
        length = shape[self.axis]
        longest = -(-length // self.size)
        lengths = [max(0, min(longest, length - rank * longest)) for rank in range(self.size)]
        return [[*shape[: self.axis], part, *shape[self.axis + 1 :]] for part in lengths]


def cuts_of(tensor: Tensor) -> list[Cut]:
    """Return the cuts that made the part of this rank, in their order; none for a tensor that is whole on each rank."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    sharded: list[tuple[int, Any]] = [
        (dimension, placement)
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    ]
    # FSDP2 cuts the parts of tensor parallelism once more. If both cut one axis, FSDP2's placement is no plain `Shard`.
    sharded.sort(key=lambda pair: not pair[1].is_shard())
    return [Cut(mesh.get_group(dimension), placement.dim) for dimension, placement in sharded]


def on_owners(
    function: Callable[[Tensor], Tensor], parts: list[Tensor], shapes: Sequence[Sequence[int]], cuts: Sequence[Cut]
) -> list[Tensor]:
    """Compute a function of whole matrices, each on one rank; return this rank's parts of the results. Collective.

    Args:
        function: function from a matrix to a matrix with the same shape and dtype.
        parts: part of each matrix on this rank, all with one dtype and on the device of collectives.
        shapes: shapes of the whole matrices.
        cuts: cuts that made the parts, in their order.
    """
    # All ranks of a group have equally many matrices.
    if not cuts or not parts:
        return [function(part) for part in parts]
    *others, cut = cuts
    own, ranks = cut.rank, range(cut.size)
    cut_shapes = [cut.shapes(_own_shape(shape, others)) for shape in shapes]
    assert all(list(part.shape) == of_ranks[own] for part, of_ranks in zip(parts, cut_shapes, strict=True))
    owned = [range(owner, len(parts), cut.size) for owner in ranks]
    received = _exchange(
        [[parts[index] for index in indices] for indices in owned],
        [[cut_shapes[index][rank] for index in owned[own]] for rank in ranks],
        parts[0],
        cut.group,
    )
    wholes = [torch.cat(of_matrix, dim=cut.axis) for of_matrix in zip(*received, strict=True)]
    results = on_owners(function, wholes, [shapes[index] for index in owned[own]], others)
    cut_results = [
        result.split([shape[cut.axis] for shape in cut_shapes[index]], dim=cut.axis)
        for index, result in zip(owned[own], results, strict=True)
    ]
    returned = _exchange(
        [[of_ranks[rank] for of_ranks in cut_results] for rank in ranks],
        [[cut_shapes[index][own] for index in indices] for indices in owned],
        parts[0],
        cut.group,
    )
    return [returned[index % cut.size][index // cut.size] for index in range(len(parts))]


def _exchange(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], like: Tensor, group: ProcessGroup
) -> list[list[Tensor]]:
    """Send each rank its tensors, and return the tensors from each rank, with known shapes. Collective.

    Args:
        sent: tensors for each rank.
        shapes: shapes of the tensors from each rank.
        like: tensor with the dtype and device of all tensors.
        group: ranks.
    """
    flat_sent = torch.cat([like.new_empty(0), *(tensor.flatten() for to_rank in sent for tensor in to_rank)])
    sizes_sent = [sum(tensor.numel() for tensor in to_rank) for to_rank in sent]
    sizes = [[math.prod(shape) for shape in from_rank] for from_rank in shapes]
    flat = like.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(flat, flat_sent, [sum(from_rank) for from_rank in sizes], sizes_sent, group=group)
    pieces = iter(flat.split([size for from_rank in sizes for size in from_rank]))
    return [[next(pieces).view(*shape) for shape in from_rank] for from_rank in shapes]


def _own_shape(shape: Sequence[int], cuts: Sequence[Cut]) -> Sequence[int]:
    """Return the shape of this rank's part of a matrix."""
    for cut in cuts:
        shape = cut.shapes(shape)[cut.rank]
    return shape


def _rounds(parameters: list[nn.Parameter], ranks: int) -> Iterator[list[nn.Parameter]]:
    """Yield matrices for one exchange after the other, in an order that gives the owners equal work."""
    ordered = sorted(parameters, key=lambda parameter: (parameter.numel(), parameter.shape), reverse=True)
    while ordered:
        number = ranks * max(1, ELEMENTS_AT_ONCE // max(1, ordered[0].numel()))
        yield ordered[:number]
        ordered = ordered[number:]


def _sharding_of(tensor: Tensor) -> Any:
    """Return mesh and placements of a DTensor, equal for DTensors that are cut alike; None for another tensor."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _own_part(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the shard of a DTensor, with shared memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
