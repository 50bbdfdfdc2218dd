"""FSDP2 for Lightning with several named engines, on CUDA and on CPU, sharing devices with a rollout engine.

Lightning's `ModelParallelStrategy` leaves the sharding to `configure_model`. Here every model that a stage names in
`engine_modules()` is sharded between `configure_model` and `configure_optimizers`, so that a stage knows nothing of it
and its optimizers hold shards: each block of a transformer for itself, and what is left with the root. An engine is the
model itself; `fully_shard` gathers what a forward or backward pass needs in the hooks of its modules. With tensor
parallelism blocks are cut over neighbouring ranks first (`tensor_parallel.py`), and sharded over the rest.

PyTorch's FSDP2: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import has_adapter, plain_weights
from rl_plugins.models.remote import RemoteLearner
from rl_plugins.rollout.engine import RolloutEngine
from rl_plugins.rollout.weights import WeightSource
from rl_plugins.strategies.contract import POLICY, HasEngines
from rl_plugins.strategies.fsdp_checkpoint import load_engine, save_engine
from rl_plugins.strategies.fsdp_weights import FSDPWeightSource, shard_of
from rl_plugins.strategies.host_memory import HostMemory
from rl_plugins.strategies.offload import STAY, WHILE_SAMPLING, Offload
from rl_plugins.strategies.phases import PhaseLog
from rl_plugins.strategies.sharded import (
    LIGHTNING_FILE,
    ShardedStrategy,
    held_here,
    optimizers_of_engines,
    states_of,
)
from rl_plugins.strategies.tensor_parallel import cut_over_group

_POLICIES = {
    "32-true": MixedPrecisionPolicy(),
    # Gradients are added up in float32 on their way to the shards.
    "bf16-true": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class FSDPStrategy(ShardedStrategy, ModelParallelStrategy):
    """FSDP2 with named engines and a rollout engine.

    The trainer's `precision`: under `bf16-true` parameters and optimizer states are bfloat16, so that small steps are
    lost in rounding; under `bf16-mixed` the shards of trained engines are float32 and are gathered in bfloat16.

    Args:
        rollout: the engine to sample with; None for stages that do not sample.
        offload: engine to `while_sampling` (the default of trained ones) or `stay`: whether, on CUDA, it and its
            optimizer states are in host memory while the rollout engine works.
        accumulate_shards: average gradients over the ranks with every micro-batch and keep shards of them, in place of
            once in an optimizer step, until when each rank keeps whole gradients of its own.
        tensor_parallel: the number of neighbouring ranks over which each block is cut.
        sequence_parallel: the number of neighbouring ranks over which the tokens of micro-batches are cut.
        timeout_s: deadline of every collective.
    """

    def __init__(
        self,
        *,
        rollout: RolloutEngine | None = None,
        offload: Mapping[str, str] | None = None,
        accumulate_shards: bool = False,
        tensor_parallel: int = 1,
        sequence_parallel: int = 1,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(tensor_parallel_size=tensor_parallel, timeout=timedelta(seconds=timeout_s))
        if min(tensor_parallel, sequence_parallel) > 1:
            raise ConfigError("tensor_parallel and sequence_parallel do not go together: set one of them to 1")
        for engine, place in (offload or {}).items():
            if place not in (STAY, WHILE_SAMPLING):
                raise ConfigError(f"offload of {engine}: {place!r} is none of stay and while_sampling")
        self._rollout = rollout
        self._offload = Offload(offload or {})
        self._accumulate_shards = accumulate_shards
        self._group_size = tensor_parallel
        self._sequence_parallel = sequence_parallel
        self._sequences = []
        self._engines: dict[str, nn.Module] = {}
        self._optimizers_of: dict[str, Optimizer] = {}
        self._gradient_norms: dict[str, float] = {}
        self._on_host = HostMemory()
        self._moved: set[str] = set()
        self._masters: dict[str, dict[str, Tensor]] = {}
        self.phases = PhaseLog()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("rl_fsdp", cls, description="FSDP2 with named engines")

    # Set-up -----------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        self._check_groups("tensor_parallel", self._group_size)
        self._check_groups("sequence_parallel", self._sequence_parallel)
        self._data_parallel_size = self.world_size // self._group_size
        super().setup_environment()
        self.phases.device = self.root_device
        if isinstance(self.lightning_module, HasEngines):
            self.precision_plugin = _NamedPrecision(str(self.precision_plugin.precision))

    @contextmanager
    def sharded_init(self, frozen: str | None = None) -> Iterator[None]:
        """Models loaded inside are whole, in host memory, on every rank, until `setup` shards them."""
        yield

    @override
    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        if isinstance(module, HasEngines):
            self._engines = dict(module.engine_modules())
            self._share_sequences(self._engines)
            for name, model in held_here(self._engines).items():
                if has_adapter(model):
                    self._agree_on_adapter(model)
                if self._group_size > 1:
                    cut_over_group(model, name, self.device_mesh["tensor_parallel"])
                shard(model, self._meshes, _POLICIES[str(self.precision_plugin.precision)])
        super().setup(trainer)
        self._optimizers_of = optimizers_of_engines(self._engines, self.optimizers)
        if self._group_size > 1:
            for group in [group for optimizer in self._optimizers_of.values() for group in optimizer.param_groups]:
                # Fused and for-each kernels take no list of tensors that are sharded in different ways.
                group.update({key: False for key in ("foreach", "fused") if key in group})
        for name, model in self._engines.items():
            # When validating, nothing is frozen: a later fit may train it.
            if trainer.state.fn == TrainerFn.FITTING and name not in self._optimizers_of:
                model.eval().requires_grad_(False)
            elif self._is_mixed:
                # Only now is it known which engines are trained. The optimizers hold the same parameters.
                model._apply(lambda tensor: tensor.float() if tensor.requires_grad else tensor)
        self.connect_rollout(self.global_rank, self.world_size)

    def _agree_on_adapter(self, model: nn.Module) -> None:
        """Rank 0's adapter is everyone's: each rank has made one of its own random numbers."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                agreed = parameter.detach().to(self.root_device)
                torch.distributed.broadcast(agreed, src=0)
                parameter.data.copy_(agreed)

    @property
    def _meshes(self) -> Meshes:
        blocks = self.device_mesh["data_parallel"]
        if self._group_size == 1:
            return Meshes(blocks, blocks)
        return Meshes(blocks, init_device_mesh(self.root_device.type, (self.world_size,)))

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Ranks that share blocks have samples of their own.
        if not isinstance(self.lightning_module, HasEngines):
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def _is_mixed(self) -> bool:
        return self.precision_plugin.precision == "bf16-mixed"

    # Running ----------------------------------------------------------------------------------------------------

    def engine(self, name: str) -> nn.Module:
        """The model itself, in shards between its passes."""
        return self._engines[name]

    def accumulate_gradients(self, name: str, *, last: bool) -> None:
        """Say whether the coming backward pass is the last before a step, with which gradients are averaged."""
        model = self._engines[name]
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last or self._accumulate_shards)
        model.set_is_last_backward(last)

    def optimizer_index(self, name: str) -> int:
        """Where the optimizer of engine `name` stands in `optimizers`."""
        return next(i for i, optimizer in enumerate(self.optimizers) if optimizer is self._optimizers_of[name])

    def gradient_norm(self, name: str) -> float | None:
        """Global norm of the last step's gradient, before clipping."""
        return self._gradient_norms.get(name)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Any, *args: Any, engine: str | None = None, **kwargs: Any
    ) -> Tensor:
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        module = self.lightning_module
        in_steps = isinstance(module, HasEngines) and not module.automatic_optimization
        if in_steps:
            # As DeepSpeed does: clipping belongs to the step, and gradients are gone after it.
            self._clip(next(name for name, own in self._optimizers_of.items() if own is optimizer))
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if in_steps:
            optimizer.zero_grad()
        self.weights_changed()
        return result

    def _clip(self, name: str) -> None:
        module = self.lightning_module
        assert isinstance(module, HasEngines)
        limit = module.gradient_clip(name) or float("inf")
        self._gradient_norms[name] = clip_gradients(list(self._engines[name].parameters()), limit)

    # Weights and memory -----------------------------------------------------------------------------------------

    @override
    def weight_source(self, name: str = POLICY) -> WeightSource:
        # What the policy computes in, whatever its shards are held in.
        dtype = torch.bfloat16 if self._is_mixed else None
        model = self._engines[name]
        source = FSDPWeightSource(model, dtype, self.global_rank % self._group_size, self._group_size)
        return plain_weights(source, model)

    @override
    def shards(self, name: str) -> Iterator[tuple[str, Tensor]]:
        for key, parameter in self._engines[name].named_parameters():
            yield key, shard_of(parameter)

    @override
    def _trained(self) -> list[str]:
        return list(self._optimizers_of)

    @override
    def _optimizer_tensors(self, name: str) -> Iterable[Tensor]:
        return states_of(self._optimizers_of[name])

    @override
    def _engine_tensors(self, name: str) -> Iterable[Tensor]:
        return self._engines[name].parameters()

    # Checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder: `lightning.ckpt` (loops, callbacks, stage state), and one of shards of each trained engine.

        Any number of ranks can read it.
        """
        if not self._engines:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(self.broadcast(os.fspath(filepath)))
        folder.mkdir(parents=True, exist_ok=True)
        for name in self._saved_engines():
            save_engine(folder / name, self._engines[name], self._optimizers_of.get(name))
        self._save_learners(folder)
        if self.is_global_zero:
            torch.save(checkpoint, folder / LIGHTNING_FILE)
        self.barrier("checkpoint written")

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what `save_checkpoint` has written with any number of ranks.

        Raises:
            ConfigError: it is not such a folder, or a part of it is missing or of another model.
        """
        if not self._engines:
            return super().load_checkpoint(checkpoint_path, weights_only)
        folder = Path(self.broadcast(os.fspath(checkpoint_path)))
        if not (folder / LIGHTNING_FILE).is_file():
            raise ConfigError(f"{folder} is not a checkpoint of this project: it has no {LIGHTNING_FILE}")
        self._begin_load(folder)
        frozen = held_here(self._engines).keys() - self._optimizers_of.keys()
        self._moved |= {name for name in frozen if (folder / name).is_dir()}
        for name in self._saved_engines():
            load_engine(folder / name, self._engines[name], self._optimizers_of.get(name))
        self.restored = {name: self._restored_of(name, folder) for name in self._engines}
        self.weights_changed()
        # The file holds loop and callback states (plain Python objects); it was written by this program.
        checkpoint: dict[str, Any] = torch.load(folder / LIGHTNING_FILE, map_location="cpu", weights_only=False)
        return checkpoint

    def _restored_of(self, name: str, folder: Path) -> str:
        if isinstance(self._engines[name], RemoteLearner):
            return self._load_learner(name, folder)
        optimizer = self._optimizers_of.get(name)
        if optimizer is None:
            return "weights" if name in self._moved else "from its own file"
        scheduled = any(config.scheduler.optimizer is optimizer for config in self.lr_scheduler_configs)
        return "weights, optimizer" + ", schedule" * scheduled

    def _saved_engines(self) -> list[str]:
        return [name for name in self._engines if name in self._optimizers_of or name in self._moved]


class _NamedPrecision(Precision):
    """Leaves dtypes and contexts alone: Lightning's plugins would cast rotary frequencies too, or open an autocast."""

    def __init__(self, precision: str) -> None:
        if precision not in _POLICIES:
            raise ConfigError(f"precision={precision}: FSDPStrategy knows {', '.join(_POLICIES)}")
        self.precision = precision  # type: ignore[assignment]


class Meshes(NamedTuple):
    """Over which ranks the parameters are sharded that the blocks have, and those that embeddings and heads have."""

    blocks: DeviceMesh
    ends: DeviceMesh


def shard(model: nn.Module, meshes: Meshes, policy: MixedPrecisionPolicy) -> None:
    """Shard every block of a model over its ranks, and what is left; once."""
    if isinstance(model, FSDPModule):
        return
    # The root, too, gives up its whole tensors after a pass: what is between passes are shards, always.
    for module in [*blocks(model), *(_between_ends(model) if meshes.blocks != meshes.ends else ())]:
        fully_shard(module, mesh=meshes.blocks, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=meshes.ends, reshard_after_forward=True, mp_policy=policy)


def _between_ends(model: nn.Module) -> list[nn.Module]:
    """What runs with the blocks, and is in none of them: norms, position embeddings."""
    assert isinstance(model, PreTrainedModel)
    inside = {id(module) for block in blocks(model) for module in block.modules()}
    return [
        module
        for module in model.base_model.modules()
        if id(module) not in inside
        and module is not model.get_input_embeddings()
        and next(module.parameters(recurse=False), None) is not None
    ]


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Scale the gradients of shards so that the norm of all is at most `limit`; returns what it was. Collective."""
    # Norms are taken of parameters that are sharded over the same ranks.
    by_mesh: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            by_mesh[parameter.grad.device_mesh].append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in alike if p.grad is not None]) for alike in by_mesh.values()]
    norm = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for alike in by_mesh.values():
        nn.utils.clip_grads_with_norm_(alike, limit, norm)
    return float(norm)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that are gathered one at a time, inner ones first.

    They are what transformers never splits over devices; of other models, the members of the outermost `ModuleList`s.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    if named:
        return [module for module in model.modules() if type(module).__name__ in named][::-1]
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    return [block for members in lists.values() for block in members]
