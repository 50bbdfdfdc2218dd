"""DeepSpeed ZeRO for Lightning with several named models, on CUDA and on CPU, sharing devices with a rollout engine.

Lightning's own DeepSpeed strategy wraps the whole LightningModule in one DeepSpeed engine and needs CUDA. With
`ZeroStrategy`, every model of `named_models()` becomes a model engine: a trained model with its own optimizer, gradient
clipping and checkpoint, a frozen model for inference only. A LightningModule without named models is wrapped whole,
as in Lightning.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.intact_checkpoint import check_state
from rl_plugins.models.loading import experts_on_first_rank
from rl_plugins.models.lora import has_adapter, plain_weights
from rl_plugins.models.remote import RemoteLearner, RemoteModel, local_models
from rl_plugins.ranks import Ranks, connected_ranks, set_default_deadline
from rl_plugins.rollout.engine import RolloutEngine
from rl_plugins.strategies.blending import BlendedModels
from rl_plugins.strategies.blocks import gather_by_block
from rl_plugins.strategies.checkpoint_folder import (
    check_written,
    load_learner,
    read_lightning,
    restored_states,
    save_unsharded,
    writer_of,
)
from rl_plugins.strategies.contract import POLICY, HasNamedModels
from rl_plugins.strategies.loss_scale import GOOD_STEPS, EngineScale, LossScale
from rl_plugins.strategies.memory import TrainingMemory
from rl_plugins.strategies.offload import Offload
from rl_plugins.strategies.optimizers import check_optimizer_of_zero, optimizer_states, optimizers_of
from rl_plugins.strategies.phase_log import PhaseLog
from rl_plugins.strategies.precision import buffers_as_built, precision_of_deepspeed
from rl_plugins.strategies.rank_groups import check_divides
from rl_plugins.strategies.rollout_phases import RolloutPhases
from rl_plugins.strategies.sequence_parallel import SequenceShards, share_sequences, stop_sharing
from rl_plugins.strategies.sharded import ShardedStrategy
from rl_plugins.strategies.weight_sources import ZeroWeightSource, zero_weights
from rl_plugins.strategies.zero_release import release_gathered, release_in_flight, release_with
from rl_plugins.strategies.zero_shards import TAG, WEIGHTS_FILE, ZeroShards, check_shards, copy_weights, weights_in
from rl_plugins.weights.source import ModuleWeightSource, WeightSource


class ZeroStrategy(ShardedStrategy, DeepSpeedStrategy):
    """ZeRO stages 1 to 3 with named models and a rollout engine.

    Args:
        stage: 1 shards optimizer states, 2 also gradients, 3 also parameters.
        rollout: rollout engine; None for stages without sampling.
        offload: model name to the place of the model's states, see `Offload`. By default, on CUDA, the states of
            trained models are on the host while the rollout engine samples.
        offload_folder: folder for the files of models with the place `nvme`.
        sequence_parallel: number of neighbouring ranks in a group. Each rank has a part of the tokens of micro-batches.
        timeout_s: deadline of every collective, in seconds.
        **kwargs: further arguments of Lightning's `DeepSpeedStrategy`.
    """

    def __init__(
        self,
        *,
        stage: int = 3,
        rollout: RolloutEngine | None = None,
        offload: Mapping[str, str] | None = None,
        offload_folder: str | Path | None = None,
        sequence_parallel: int = 1,
        timeout_s: float = 2400.0,
        **kwargs: Any,
    ) -> None:
        # The default buckets reserve 0.8 GB on each rank, also for a small model.
        for name in ("allgather_bucket_size", "reduce_bucket_size"):
            kwargs.setdefault(name, 50_000_000)
        # A step of stage 3 has the float32 gradients of one group at a time. By default, a group is the whole shard.
        kwargs.setdefault("sub_group_size", 1_000_000_000)
        kwargs.setdefault("overlap_comm", torch.cuda.is_available())
        kwargs.setdefault("logging_batch_size_per_gpu", 1)
        # In float16: the steps of `LossScale`.
        kwargs.setdefault("loss_scale_window", GOOD_STEPS)
        kwargs.setdefault("hysteresis", 1)
        self._offload = Offload(offload or {}, Path(offload_folder) if offload_folder else None)
        self._offload.check(stage)
        self._sequence_parallel = sequence_parallel
        self._sequences: list[SequenceShards] = []
        super().__init__(stage=stage, timeout=timedelta(seconds=timeout_s), **kwargs)
        self.ranks = Ranks()
        self.phase_log = PhaseLog()
        memory = TrainingMemory(self._optimizer_tensors, self._model_tensors, self._gradient_buffers)
        self.rollout_phases = RolloutPhases(rollout, self, memory)
        self._model_engines: dict[str, Any] = {}
        self._trained: dict[str, Any] = {}
        self._scales: dict[str, EngineScale] = {}
        self._saved_states: dict[str, str] = {}
        self.blended = BlendedModels(self.shards)

    # Set-up -----------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.precision_plugin = precision_of_deepspeed(
            self.precision_plugin, keeps_buffers=isinstance(self.lightning_module, HasNamedModels)
        )
        set_default_deadline(self._timeout)
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()
        check_divides("sequence_parallel", self._sequence_parallel, self.world_size)
        self.ranks = connected_ranks(self.global_rank, self.world_size, self.root_device, self._timeout)
        self.phase_log.device = self.root_device
        self.rollout_phases.prepare(shared=self._one_rollout_engine)

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type == "cuda":
            super().setup_distributed()
            return
        import deepspeed

        assert self.cluster_environment is not None
        self.set_world_ranks()
        self._set_node_environment_variables()
        self._process_group_backend = "gloo"
        # DeepSpeed prints the name of the communication op.
        with redirect_stdout(io.StringIO()):
            deepspeed.init_distributed(
                "gloo", distributed_port=self.cluster_environment.main_port, timeout=self._timeout, verbose=False
            )

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.rollout_phases.connect()

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        # zero.Init patches every module built in the process; stages enter `sharded_init` for each model instead.
        if isinstance(self.lightning_module, HasNamedModels):
            yield
            return
        with super().model_sharded_context():
            yield

    @contextmanager
    def sharded_init(self, frozen: str | None = None) -> Iterator[None]:
        """Shard models during `from_pretrained` inside this context, under stage 3.

        Args:
            frozen: name of a frozen model, to create the shards at the model's offload place, because DeepSpeed does
                not move the shards later; None for trained models.
        """
        self._init_config_if_needed()
        if not self.zero_stage_3:
            yield
            return
        from transformers.integrations import HfDeepSpeedConfig

        # While this object exists, transformers enters zero.Init. A second zero.Init would convert tensors to bfloat16.
        keep_alive = HfDeepSpeedConfig(self.config if frozen is None else self._frozen_config(frozen))
        with experts_on_first_rank(self.global_rank), buffers_as_built():
            yield
        del keep_alive

    @override
    def init_deepspeed(self) -> None:
        """Make the model engines. Lightning's `DeepSpeedStrategy.setup` calls this method."""
        module = self.lightning_module
        if not isinstance(module, HasNamedModels):
            super().init_deepspeed()
            return
        assert isinstance(module, LightningModule)
        optimizers: list[Optimizer] = []
        if module.trainer.state.fn == TrainerFn.FITTING:
            optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
        models = module.named_models()
        self._sequences = share_sequences(models, self._sequence_parallel)
        optimizer_of = optimizers_of(models, optimizers)
        self._trained, self._scales = {}, {}
        for name, model in models.items():
            if name in optimizer_of:
                engine = self._train_engine(name, model, optimizer_of[name], module.gradient_clip(name))
                self._model_engines[name] = self._trained[name] = engine
                self._scales[name] = EngineScale(engine)
                self._saved_states[name] = restored_states(model, optimizer_of[name], self.lr_scheduler_configs)
            else:
                self._model_engines[name] = self._frozen_engine(name, model)
        self.optimizers = [engine.optimizer for engine in self._trained.values()]
        # Lightning calls training_step on `self.model`. The models inside the module are wrapped one by one.
        self.model = module

    def _train_engine(self, name: str, model: nn.Module, optimizer: Optimizer, gradient_clip: float) -> Any:
        check_optimizer_of_zero(optimizer)
        assert isinstance(self.config, dict)
        zero = self.config["zero_optimization"]
        in_float32 = zero["stage"] > 1 or self.config.get("fp16", {}).get("enabled", False)
        config = {
            **self.config,
            "gradient_clipping": gradient_clip,
            "zero_optimization": {**zero, **self._offload.of_trained(name)},
            # Keep the stage's optimizer, also if DeepSpeed offloads the optimizer states.
            "zero_force_ds_cpu_optimizer": False,
            # By itself, DeepSpeed adds up the gradients of micro-batches in the dtype of the passes.
            "data_types": {"grad_accum_dtype": "fp32" if in_float32 else None},
        }
        parameters = [p for p in model.parameters() if p.requires_grad]
        return self._engine(model, config, model_parameters=parameters, optimizer=optimizer)

    def _frozen_engine(self, name: str, model: nn.Module) -> Any:
        assert self.lightning_module is not None
        if isinstance(model, RemoteModel):
            return model
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            # In validation the model stays trainable, because a later fit may train the model.
            model.eval().requires_grad_(False)
        if not self.zero_stage_3:
            if self._offload.of_frozen(name):
                raise ConfigError(f"offload={{{name!r}: 'cpu'}}: a frozen model needs stage=3: set it, or use stay")
            return model.to(self.root_device)
        return self._engine(model, self._frozen_config(name))

    def _engine(self, model: nn.Module, config: Mapping[str, Any], **training: Any) -> Any:
        import deepspeed

        if self.zero_stage_3:
            gather_by_block(model)
        engine, _, _, _ = deepspeed.initialize(model=model, config=config, dist_init_required=False, **training)
        release_with(self, engine)
        return engine

    def _frozen_config(self, name: str) -> dict[str, Any]:
        assert isinstance(self.config, dict)
        config = {k: v for k, v in self.config.items() if k not in ("gradient_clipping", "activation_checkpointing")}
        return {**config, "zero_optimization": {**config["zero_optimization"], **self._offload.of_frozen(name)}}

    # Running ----------------------------------------------------------------------------------------------------

    @property
    def needs_all_parameters(self) -> bool:
        """True with several ranks, which sum gradients together, and under stage 3.

        Stage 3 with an offloaded optimizer would step an unused parameter by the gradient of an earlier step.
        """
        return self.zero_stage_3 or self.world_size > 1

    def model_engine(self, name: str) -> nn.Module:
        """Return the DeepSpeed engine of a trained or sharded model, or the model itself."""
        engine: nn.Module = self._model_engines[name]
        return engine

    def announce_backward(self, name: str, *, last: bool) -> None:
        """Announce a backward pass; `last` is True for the last pass before the optimizer step."""
        self._model_engines[name].set_gradient_accumulation_boundary(last)

    def optimizer_index(self, name: str) -> int:
        """Return the index of the optimizer of model `name` in `optimizers`."""
        return list(self._trained).index(name)

    def gradient_norm(self, name: str) -> float | None:
        """Return the global norm of the last step's gradient before clipping; None after an overflow of float16."""
        return self._scales[name].norm

    def scale_of_loss(self, name: str) -> LossScale | None:
        """Return the scale of the loss of model `name`, which DeepSpeed keeps; None without float16."""
        return self._scales[name].scale

    @override
    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        *args: Any,
        model_name: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the gradients of a model: `model_name`, or Lightning's model.

        Lightning calls `backward` from `manual_backward`, or from its own loop. Lightning's precision plugin then calls
        `backward` of the DeepSpeed engine.
        """
        with self._as_model(self._model_engines[model_name] if model_name else self.model):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the model of `optimizer`. The next rollout phase then sends the weights to the rollout engine.

        Lightning calls `optimizer_step` from `LightningOptimizer.step`. Lightning's precision plugin then calls `step`
        of the DeepSpeed engine, which clips the gradients, updates the shards of this rank, and clears the gradients.
        """
        self.rollout_phases.memory.wait_for_optimizer()
        name = next((name for name, engine in self._trained.items() if engine.optimizer is optimizer), None)
        stepped: Any = self.model if name is None else self._trained[name]
        scale = EngineScale(stepped) if name is None else self._scales[name]
        with self._as_model(stepped), scale.step():
            result = super().optimizer_step(optimizer, closure, model or self.lightning_module, **kwargs)
        if self.zero_stage_3 and not stepped.optimizer.offload_optimizer:
            # A parameter that the next step does not use would take its gradient of this step.
            stepped.optimizer.grad_partitions_flat_buffer.zero_()
        self.rollout_phases.weights_changed()
        return result

    @contextmanager
    def _as_model(self, engine: Any) -> Iterator[None]:
        # Lightning's DeepSpeed precision plugin runs backward and step on `trainer.model`.
        previous, self.model = self.model, engine
        try:
            yield
        finally:
            self.model = previous

    # Weights and memory -----------------------------------------------------------------------------------------

    def weight_source(self, name: str = POLICY) -> WeightSource:
        """Return the weights of a model, for a rollout engine or an export."""
        module, place = self._module_of(name), (self.global_rank, self.world_size)
        if not self.zero_stage_3:
            return plain_weights(ModuleWeightSource(module, *place), module)
        return zero_weights(self._model_engines[name], *place)

    def shards(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and this rank's shard of each parameter. Collective."""
        module = self._module_of(name)
        if not self.zero_stage_3:
            yield from ((key, parameter.data) for key, parameter in module.named_parameters())
            return
        # The next pass gathers the written shards, also of small parameters, which stay gathered between passes.
        release_gathered(self._model_engines[name])
        # The padding of the last shard is memory that DeepSpeed has not initialized: any number, also NaN.
        for key, _, shard in ZeroWeightSource(module, self.global_rank, self.world_size).shards():
            yield key, shard

    def _module_of(self, name: str) -> nn.Module:
        module: nn.Module = getattr(self._model_engines[name], "module", self._model_engines[name])
        return module

    def _optimizer_tensors(self) -> Iterable[Tensor]:
        for name in self._trained.keys() & self._on_host_while_sampling():
            optimizer = self._trained[name].optimizer
            yield from optimizer_states(optimizer.optimizer)
            # Master weights of stage 3, of stages 1 and 2, and of stage 1 in bfloat16.
            yield from getattr(optimizer, "fp32_partitioned_groups_flat", ())
            yield from getattr(optimizer, "single_partition_of_fp32_groups", ())
            yield from getattr(optimizer, "fp32_groups_flat_partition", ())

    def _model_tensors(self) -> Iterable[Tensor]:
        for name in self._on_host_while_sampling():
            parameters: list[Any] = [*self._module_of(name).parameters()]
            if self.zero_stage_3:
                release_in_flight(self._model_engines[name])
                yield from (parameter.ds_tensor for parameter in parameters)
            yield from (parameter.data for parameter in parameters)

    def _gradient_buffers(self) -> Iterable[Tensor]:
        # `optimizer_step` leaves zeros.
        for name in self._on_host_while_sampling():
            optimizer = getattr(self._model_engines[name], "optimizer", None)
            gradients = getattr(optimizer, "grad_partitions_flat_buffer", None)
            if gradients is not None:
                yield gradients

    def _on_host_while_sampling(self) -> list[str]:
        models = local_models(self._model_engines)
        return [name for name in models if self._offload.moves(name, trained=name in self._trained)]

    # Checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        """Write a folder: `lightning.ckpt` (loops, callbacks, stage), and the shards of each trained model."""
        if not self._model_engines:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        from rl_plugins.strategies.zero_checkpoint import save_shards

        self.rollout_phases.memory.wait_for_optimizer()
        folder = Path(self.broadcast(os.fspath(filepath)))
        writer = writer_of(storage_options, folder)
        for name, engine in self._trained.items():
            # For a model with an adapter, the frozen weights remain only in the folder of the model.
            save_shards(writer, engine, folder / name, rank=self.global_rank, without_frozen=has_adapter(engine.module))
        for name in sorted(self.blended.names - self._trained.keys()):
            weights = {k: t.to("cpu", copy=True) for k, t in self.weight_source(name) if self.is_global_zero}
            if self.is_global_zero:
                writer.make_folder(folder / name)
                writer.save(weights, folder / name / WEIGHTS_FILE)
        if self.is_global_zero:
            save_unsharded(writer, folder, self._model_engines, checkpoint)
        check_written(writer, storage_options, folder)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if not self._model_engines:
            return super().load_checkpoint(checkpoint_path, weights_only)
        folder = Path(checkpoint_path)
        check_state(folder, self.known_intact)
        self.known_intact = None
        states = read_lightning(folder, self._model_engines, self.blended)
        self.rollout_phases.memory.wait_for_optimizer()
        check_shards(folder, list(self._trained))
        self.restored = {
            name: self._load_trained(folder, name) if name in self._trained else self._load_frozen(folder, name)
            for name in self._model_engines
        }
        self.rollout_phases.weights_changed()
        return states

    def _load_trained(self, folder: Path, name: str) -> str:
        """Load the shards of a trained model; return the restored states in words."""
        from rl_plugins.strategies.zero_checkpoint import load_shards

        engine, shards = self._trained[name], ZeroShards(folder / name / TAG)
        shards.check_model(engine.module)
        shards.check_place(engine, self.world_size)
        if shards.fit(engine, self.world_size):
            load_shards(engine, folder / name)
            return self._saved_states[name]
        shards.restore(engine, self.global_rank, self.world_size)
        return (
            f"{self._saved_states[name]}, redistributed from {shards.workers} workers under ZeRO-{shards.stage} "
            f"to {self.world_size} under ZeRO-{engine.zero_optimization_stage()}"
        )

    def _load_frozen(self, folder: Path, name: str) -> str:
        """Load a model without an optimizer in this process; return the restored states in words."""
        model: nn.Module = self._model_engines[name]
        if isinstance(model, RemoteLearner):
            load_learner(model, folder / name, self.ranks)
            return restored_states(model, None, ())
        if isinstance(model, RemoteModel) or not (folder / name).is_dir():
            return "from its own file"
        module = self._module_of(name)
        weights = weights_in(folder / name, module)
        self.blended.names.add(name)
        copy_weights(module, weights, self.global_rank)
        return "weights"

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._model_engines:
            super().load_model_state_dict(checkpoint, strict)

    @override
    def teardown(self) -> None:
        stop_sharing(self._sequences)
        self.rollout_phases.close()
        # Lightning's method copies module and optimizer states to the host, and an export needs one device for all.
        assert self.cluster_environment is not None and self.accelerator is not None
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()
