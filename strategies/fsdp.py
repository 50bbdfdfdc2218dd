"""FSDP2 for Lightning with several named models, on CUDA and on CPU, sharing devices with a rollout engine.

Lightning's `ModelParallelStrategy` leaves the sharding to `configure_model`. `FSDPStrategy` shards every model of
`named_models()` between `configure_model` and `configure_optimizers`. So the stage does not shard, and the optimizers
of the stage hold shards. Each block of a transformer is one unit. The other parameters belong to the root. A model
engine is the model itself: the hooks of `fully_shard` gather parameters for a forward or backward pass. With tensor
parallelism, blocks are first cut over neighbouring ranks (`tensor_parallel.py`) and then sharded over the other ranks.
With `workers_per_copy`, every group of neighbouring ranks shards a copy of the models. With expert parallelism, the
experts of each layer are divided over neighbouring ranks (`expert_parallel.py`).

PyTorch's FSDP2: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement
from transformers import PreTrainedModel
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.intact_checkpoint import check_state
from rl_plugins.models.loading import without_weights
from rl_plugins.models.lora import plain_weights
from rl_plugins.models.remote import RemoteLearner, RemoteModel, local_models
from rl_plugins.ranks import Ranks, connected_ranks, set_default_deadline
from rl_plugins.rollout.engine import RolloutEngine
from rl_plugins.strategies.autograd_steps import AutogradSteps
from rl_plugins.strategies.blending import BlendedModels
from rl_plugins.strategies.blocks import blocks
from rl_plugins.strategies.checkpoint_folder import (
    check_written,
    load_learner,
    read_lightning,
    restored_states,
    save_unsharded,
    writer_of,
)
from rl_plugins.strategies.contract import POLICY, HasNamedModels
from rl_plugins.strategies.expert_parallel import check_experts, divide_experts, expert_mesh, shard_experts
from rl_plugins.strategies.fsdp_shards import load_model, save_model, send_shards, take_tensors
from rl_plugins.strategies.memory import TrainingMemory
from rl_plugins.strategies.offload import HOST, STAY, WHILE_SAMPLING, Offload
from rl_plugins.strategies.optimizers import check_optimizer_of_fsdp, optimizer_states, optimizers_of
from rl_plugins.strategies.phase_log import PhaseLog
from rl_plugins.strategies.precision import with_parameters_in
from rl_plugins.strategies.rank_groups import check_divides
from rl_plugins.strategies.rollout_phases import RolloutPhases
from rl_plugins.strategies.sequence_parallel import SequenceShards, share_sequences, stop_sharing
from rl_plugins.strategies.sharded import ShardedStrategy
from rl_plugins.strategies.tensor_parallel import cut_over_group
from rl_plugins.strategies.weight_sources import FSDPWeightSource, shard_of
from rl_plugins.weights.source import WeightSource, device_of

_POLICIES = {
    "32-true": MixedPrecisionPolicy(),
    # The sum of gradients over ranks is in float32.
    "bf16-true": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "16-mixed": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}


class FSDPStrategy(ShardedStrategy, AutogradSteps, ModelParallelStrategy):
    """FSDP2 with named models and a rollout engine.

    The trainer's `precision`: with `bf16-true`, parameters and optimizer states are bfloat16, and rounding removes
    small steps. With `bf16-mixed`, the shards of trained models are float32 and are gathered in bfloat16; with
    `16-mixed`, in float16, and the loss is scaled. Lightning refuses the flag `16-mixed` for this strategy: pass
    `Trainer(plugins=MixedPrecision("16-mixed", "cuda"))` of `lightning.pytorch.plugins` in its place.

    Args:
        rollout: rollout engine; None for stages without sampling.
        offload: model name to the place of the model and its optimizer states. With `stay`, on the device; with
            `while_sampling`, in host memory while the rollout engine samples on CUDA; with `cpu`, always in host
            memory, from which each pass fetches one block at a time. The default is `while_sampling` for trained models
            and `stay` for frozen models.
        accumulate_shards: average the gradients over the ranks after every micro-batch and keep only shards. By
            default each rank keeps whole gradients, and the ranks average gradients once for each optimizer step.
        workers_per_copy: number of neighbouring ranks that share one copy of the models, such as the ranks of a node.
            Parameters are then gathered in a node, and only gradients are summed over the nodes. 0 shares one copy over
            all ranks.
        tensor_parallel: number of neighbouring ranks in a group. Each rank has a part of each block.
        sequence_parallel: number of neighbouring ranks in a group. Each rank has a part of the tokens of micro-batches.
        expert_parallel: number of neighbouring ranks in a group. Each rank has a part of the experts of each layer.
        timeout_s: deadline of every collective, in seconds.
    """

    def __init__(
        self,
        *,
        rollout: RolloutEngine | None = None,
        offload: Mapping[str, str] | None = None,
        accumulate_shards: bool = False,
        workers_per_copy: int = 0,
        tensor_parallel: int = 1,
        sequence_parallel: int = 1,
        expert_parallel: int = 1,
        timeout_s: float = 2400.0,
    ) -> None:
        super().__init__(tensor_parallel_size=tensor_parallel, timeout=timedelta(seconds=timeout_s))
        if min(tensor_parallel, sequence_parallel) > 1:
            raise ConfigError("tensor_parallel and sequence_parallel cannot be combined: set one of them to 1")
        if tensor_parallel > 1 and workers_per_copy:
            raise ConfigError("workers_per_copy and tensor_parallel cannot be combined: leave one of them out")
        if expert_parallel > 1 and (workers_per_copy or tensor_parallel > 1):
            raise ConfigError(
                "expert_parallel cannot be combined with tensor_parallel and workers_per_copy: leave one of them out"
            )
        for name, place in (offload or {}).items():
            if place not in (STAY, WHILE_SAMPLING, HOST):
                raise ConfigError(
                    f"offload={{{name!r}: {place!r}}}: with FSDPStrategy, use stay, while_sampling or cpu"
                )
        self.ranks = Ranks()
        self.phase_log = PhaseLog()
        self.rollout_phases = RolloutPhases(rollout, self, TrainingMemory(self._optimizer_tensors, self._model_tensors))
        self._offload = Offload(offload or {})
        self._accumulate_shards = accumulate_shards
        self._workers_per_copy = workers_per_copy
        self._group_size = tensor_parallel
        self._sequence_parallel, self._expert_parallel = sequence_parallel, expert_parallel
        self._sequences: list[SequenceShards] = []
        self._model_engines: dict[str, nn.Module] = {}
        self.blended = BlendedModels(self.shards)

    # Set-up -----------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        check_divides("workers_per_copy", self._workers_per_copy or 1, self.world_size)
        check_divides("tensor_parallel", self._group_size, self.world_size)
        check_divides("sequence_parallel", self._sequence_parallel, self.world_size)
        check_divides("expert_parallel", self._expert_parallel, self.world_size)
        self._data_parallel_size = self.world_size // self._group_size
        set_default_deadline(self._timeout)
        super().setup_environment()
        self.ranks = connected_ranks(self.global_rank, self.world_size, self.root_device, self._timeout)
        self.phase_log.device = self.root_device
        self.rollout_phases.prepare(shared=self._one_rollout_engine)
        if isinstance(self.lightning_module, HasNamedModels):
            self.precision_plugin = _NamedPrecision(str(self.precision_plugin.precision))

    @contextmanager
    def sharded_init(self, frozen: str | None = None) -> Iterator[None]:
        """Load models whole on rank 0, and without weights on the other ranks. `setup` gives all ranks their shards."""
        with without_weights() if self.global_rank else nullcontext():
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        if isinstance(module, HasNamedModels):
            self._model_engines = dict(module.named_models())
            self._sequences = share_sequences(self._model_engines, self._sequence_parallel)
            if self._experts is not None:
                check_experts(local_models(self._model_engines), self._experts.size(1))
            for name, model in local_models(self._model_engines).items():
                # An earlier validation or fit may have sharded the model.
                if not isinstance(model, FSDPModule):
                    self._shard(name, model)
        super().setup(trainer)
        for optimizer in self.optimizers:
            check_optimizer_of_fsdp(optimizer)
        self._optimizers_of = optimizers_of(self._model_engines, self.optimizers)
        if self._group_size > 1 or self._experts is not None:
            for group in [group for optimizer in self._optimizers_of.values() for group in optimizer.param_groups]:
                # Fused and for-each kernels refuse tensors with different shardings in one list.
                group.update({key: False for key in ("foreach", "fused") if key in group})
        for name, model in self._model_engines.items():
            # In validation all models stay trainable, because a later fit may train the models.
            is_frozen = trainer.state.fn == TrainerFn.FITTING and name not in self._optimizers_of
            if self._passes_dtype is not None:
                # The optimizers show which models are trained, and keep the same parameters after this change of dtype.
                # FSDP2 keeps the dtypes of the first pass, so a validation before a fit has float32 shards.
                dtype = self._passes_dtype if is_frozen else torch.float32
                model._apply(lambda tensor, dtype=dtype: tensor.to(dtype) if tensor.requires_grad else tensor)
            if is_frozen:
                model.eval().requires_grad_(False)
        self.rollout_phases.connect()

    def _shard(self, name: str, model: nn.Module) -> None:
        """Shard a model with the weights of rank 0: an adapter is random, and other ranks may have no weights."""
        if self.precision_plugin.precision == "bf16-true":
            # FSDP2 refuses parameters of two dtypes in one block, such as a router in float32.
            with_parameters_in(model, "bfloat16")
        whole = take_tensors(model)
        if not self.is_global_zero:
            whole.clear()
        if self._group_size > 1:
            cut_over_group(model, name, self.device_mesh["tensor_parallel"])
        experts = [] if self._experts is None else divide_experts(model, name, self._experts)
        on_host, on_cuda = self._offload.on_host(name), self.root_device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=on_cuda) if on_host else None
        shard(model, self._meshes, _POLICIES[str(self.precision_plugin.precision)], offload, experts)
        send_shards(model, whole, self.root_device, on_host=on_host)

    @override
    def model_to_device(self) -> None:
        # Each model of a stage is in its place.
        if not self._model_engines:
            super().model_to_device()

    @cached_property
    def _meshes(self) -> Meshes:
        if self._workers_per_copy:
            sizes = self.world_size // self._workers_per_copy, self._workers_per_copy
            copies = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("copies", "shards"))
            return Meshes(copies, copies)
        blocks = self.device_mesh["data_parallel"]
        if self._group_size == 1:
            return Meshes(blocks, blocks, self._experts)
        return Meshes(blocks, init_device_mesh(self.root_device.type, (self.world_size,)))

    @cached_property
    def _experts(self) -> DeviceMesh | None:
        if self._expert_parallel == 1:
            return None
        return expert_mesh(self.root_device.type, self.world_size, self._expert_parallel)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # All ranks train on different samples, also the ranks of a tensor-parallel group.
        if not isinstance(self.lightning_module, HasNamedModels):
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def _passes_dtype(self) -> torch.dtype | None:
        """Dtype of the passes of models with float32 shards; None if the shards have the dtype of the passes."""
        return _POLICIES[str(self.precision_plugin.precision)].param_dtype

    # Running ----------------------------------------------------------------------------------------------------

    def model_engine(self, name: str) -> nn.Module:
        """Return the model itself."""
        return self._model_engines[name]

    def announce_backward(self, name: str, *, last: bool) -> None:
        """Announce a backward pass. The last pass before the optimizer step averages the gradients."""
        model = self._model_engines[name]
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last or self._accumulate_shards)
        # With several copies of the models, gradients are summed over the copies once.
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)

    @override
    def clip_gradients(self, parameters: Sequence[nn.Parameter], limit: float) -> float:
        """See `AutogradSteps`; the norm is over the shards of all ranks."""
        return clip_gradients(parameters, limit)

    # Weights and memory -----------------------------------------------------------------------------------------

    def weight_source(self, name: str = POLICY) -> WeightSource:
        """Return the weights of a model in the compute dtype, for a rollout engine or an export."""
        model = self._model_engines[name]
        size = max(self._group_size, self._expert_parallel)
        source = FSDPWeightSource(model, self._passes_dtype, self.global_rank % size, size)
        return plain_weights(source, model)

    def shards(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this rank's shard of each parameter."""
        for key, parameter in self._model_engines[name].named_parameters():
            yield key, shard_of(parameter)

    def _optimizer_tensors(self) -> Iterable[Tensor]:
        for name in self._optimizers_of.keys() & self._on_host_while_sampling():
            yield from optimizer_states(self._optimizers_of[name])

    def _model_tensors(self) -> Iterable[Tensor]:
        for name in self._on_host_while_sampling():
            yield from self._model_engines[name].parameters()

    def _on_host_while_sampling(self) -> list[str]:
        models = local_models(self._model_engines)
        return [name for name in models if self._offload.moves(name, trained=name in self._optimizers_of)]

    # Checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        """Write a folder: `lightning.ckpt` (loops, callbacks, stage), and a folder of shards for each trained model.

        Any number of ranks can load the folder.
        """
        if not self._model_engines:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.rollout_phases.memory.wait_for_optimizer()
        folder = Path(self.broadcast(os.fspath(filepath)))
        writer = writer_of(storage_options, folder)
        for name, model in self._model_engines.items():
            if name in self._optimizers_of or name in self.blended.names:
                save_model(writer, folder / name, model, self._optimizers_of.get(name))
        if self.is_global_zero:
            self.add_loss_scales(checkpoint)
            save_unsharded(writer, folder, self._model_engines, checkpoint)
        check_written(writer, storage_options, folder)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder of `save_checkpoint`, written with any number of ranks.

        Raises:
            CheckpointError: the folder is no checkpoint, or a part is missing or belongs to another model.
        """
        if not self._model_engines:
            return super().load_checkpoint(checkpoint_path, weights_only)
        folder = Path(self.broadcast(os.fspath(checkpoint_path)))
        check_state(folder, self.known_intact)
        self.known_intact = None
        states = read_lightning(folder, self._model_engines, self.blended)
        self.restore_loss_scales(states)
        self.rollout_phases.memory.wait_for_optimizer()
        self.restored = {name: self._load_model(name, folder / name) for name in self._model_engines}
        self.rollout_phases.weights_changed()
        return states

    def _load_model(self, name: str, folder: Path) -> str:
        """Load a model, and return the restored states in words. Collective."""
        model, optimizer = self._model_engines[name], self._optimizers_of.get(name)
        if isinstance(model, RemoteLearner):
            load_learner(model, folder, self.ranks)
        elif optimizer is None and (isinstance(model, RemoteModel) or not folder.is_dir()):
            return "from its own file"
        else:
            if optimizer is None:
                self.blended.names.add(name)
            load_model(folder, model, optimizer)
        return restored_states(model, optimizer, self.lr_scheduler_configs)

    @override
    def teardown(self) -> None:
        stop_sharing(self._sequences)
        self.rollout_phases.close()
        super().teardown()


class _NamedPrecision(Precision):
    """Precision plugin without effect, because Lightning's plugins would cast rotary frequencies or use autocast."""

    def __init__(self, precision: str) -> None:
        if precision not in _POLICIES:
            raise ConfigError(f"precision={precision}: with FSDPStrategy, use one of {', '.join(_POLICIES)}")
        self.precision = precision  # type: ignore[assignment]


class Meshes(NamedTuple):
    """Groups of ranks for the shards of parameters.

    Attributes:
        blocks: ranks for the parameters of blocks.
        ends: ranks for the parameters of embeddings and output heads.
        experts: mesh for the parameters of experts, with expert parallelism.
    """

    blocks: DeviceMesh
    ends: DeviceMesh
    experts: DeviceMesh | None = None


def shard(
    model: nn.Module,
    meshes: Meshes,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy | None = None,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Shard divided experts of a model, then every block, and then the other parameters."""
    # The root also frees whole tensors after a pass: between passes there are only shards.
    options: dict[str, Any] = {
        "reshard_after_forward": True,
        "mp_policy": policy,
        "offload_policy": offload or OffloadPolicy(),
    }
    if meshes.experts is not None:
        shard_experts(experts, meshes.experts, options)
    for module in [*blocks(model), *(_between_ends(model) if meshes.blocks != meshes.ends else ())]:
        fully_shard(module, mesh=meshes.blocks, **options)
    fully_shard(model, mesh=meshes.ends, **options)


def _between_ends(model: nn.Module) -> list[nn.Module]:
    """Return the modules outside of blocks that are sharded like blocks: norms and position embeddings."""
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
    """Scale sharded gradients to a global norm of at most `limit`; return the norm before. Collective."""
    sharded_alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            sharded_alike[parameter.grad.device_mesh, parameter.grad.placements].append(parameter)
    norm = torch.stack([_sum_of_squares(alike, *key) for key, alike in sharded_alike.items()]).sum().sqrt()
    for alike in sharded_alike.values():
        nn.utils.clip_grads_with_norm_(alike, limit, norm)
    return float(norm)


def _sum_of_squares(parameters: list[nn.Parameter], mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return the sum of the squares of gradients with equal sharding. Only the sum moves to the device."""
    shards = [parameter.grad.to_local() for parameter in parameters if isinstance(parameter.grad, DTensor)]
    squares = [torch.linalg.vector_norm(s, dtype=torch.promote_types(s.dtype, torch.float32)) ** 2 for s in shards]
    own = torch.stack(squares).sum().to(device_of(mesh))
    summed = [placement if placement.is_replicate() else Partial() for placement in placements]
    return DTensor.from_local(own, mesh, summed).full_tensor()
