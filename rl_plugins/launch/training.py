"""Training in one process of a run: the parts that a recipe puts together, and the end of training.

Each training worker makes a `TrainingRun` and calls `call_recipe`, which calls the function `train(run)` of a module in
`rl_plugins/recipes`. The recipe gets the arguments of its stage and its data module from the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, cast

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import Profiler

from rl_plugins.callbacks.averages import PolicyAverage, ReferenceUpdate
from rl_plugins.callbacks.best_checkpoints import BestCheckpoints
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint, callbacks_of
from rl_plugins.callbacks.checkpoint_artifacts import CheckpointReference
from rl_plugins.callbacks.compiled_blocks import CompiledBlocks
from rl_plugins.callbacks.divergence_guard import DivergenceGuard
from rl_plugins.callbacks.graceful_stop import GracefulStop
from rl_plugins.callbacks.liger_kernels import LigerKernels
from rl_plugins.callbacks.progress import DataReport, StepProgress
from rl_plugins.callbacks.report import Curves, RunReport
from rl_plugins.callbacks.rollout_dump import RolloutDump, RolloutReplay
from rl_plugins.callbacks.router_losses import RouterLosses
from rl_plugins.callbacks.samples import RolloutTraces, SampleTable
from rl_plugins.callbacks.system_metrics import SystemMetrics
from rl_plugins.callbacks.target_reward import TargetReward
from rl_plugins.callbacks.throughput import Throughput
from rl_plugins.config.models import RewardModelConfig, RewardModelOptions
from rl_plugins.config.precision import FLOAT16
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.datamodule import StepDataModule, StepOptions
from rl_plugins.data.image_prompts import load_tokenizer_or_processor, tokenizer_of
from rl_plugins.data.tokenization import FilterOrError, check_same_tokens
from rl_plugins.errors import DataError
from rl_plugins.launch.argument_errors import RUN_OPTIONS, errors_with_options
from rl_plugins.launch.instantiation import instantiate_as, instantiate_nodes, training_data
from rl_plugins.launch.mlflow_run import best_upload, failed_on_error, register, tracking_logger
from rl_plugins.launch.resume import note_end
from rl_plugins.launch.task_environment import open_environment
from rl_plugins.launch.terminal import quiet_libraries
from rl_plugins.models.pool import ModelPool
from rl_plugins.run_folder import RunFolder, checkpoint_step, read_metrics
from rl_plugins.stages.arguments import GenerationArguments, PreferenceArguments, StageArguments, ValidationArguments
from rl_plugins.stages.critic_pool import CriticPool
from rl_plugins.stages.sampling import AnyEnvironment, Scorer, greedy
from rl_plugins.stages.stage import Stage
from rl_plugins.strategies.contract import COST_CRITIC, CRITIC, TEACHER
from rl_plugins.tracking.loggers import JsonLinesLogger, mlflow_loggers

if TYPE_CHECKING:
    from rl_plugins.strategies.ray import RayFSDPStrategy, RayZeroStrategy
    from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

_RECIPES = {"policy_optimization": "grpo"}
"""Module of the recipe of a value of the option `stage`, if the module has another name than the value."""


class DataOptions(StepOptions):
    """Arguments of a data module of a run, without the training data."""

    validation: Required[list[str] | None]


@dataclass(frozen=True)
class TrainingRun:
    """Options of a run, and the objects made by its launcher in this process.

    Attributes:
        config: options of the run.
        folder: folder of the run.
        strategy: strategy of the trainer.
        scorer: scores the responses; None if the stage samples nothing, or the environment scores by itself.
        checkpoint: folder of the checkpoint from which training continues; None starts from the beginning.
        in_ray: True in a worker of Ray Train.
        redraw_s: seconds between two updates of the progress bar.
        started: time at which the command started, in seconds since the epoch.
        pools: models with separate processes.
        trainer_options: further arguments of Lightning's trainer.
    """

    config: RecipeConfig
    folder: RunFolder
    strategy: SingleDeviceRolloutStrategy | RayZeroStrategy | RayFSDPStrategy
    scorer: Scorer | None
    checkpoint: Path | None
    in_ray: bool
    redraw_s: float
    started: float
    pools: Sequence[ModelPool] = ()
    trainer_options: Mapping[str, Any] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack, init=False)

    def call_recipe(self) -> None:
        """Call `train` of the recipe for the option `stage`. Errors name options in place of arguments."""
        quiet_libraries()
        seed_everything(self.config.run.seed, verbose=False)
        if self.config.on_gpus:
            # TF32 for products of float32 numbers.
            torch.set_float32_matmul_precision("high")
        try:
            with errors_with_options(RUN_OPTIONS):
                stage = self.config.stage
                import_module(f"rl_plugins.recipes.{_RECIPES.get(stage, stage)}").train(self)
        finally:
            self._open.close()

    # Arguments of stages ----------------------------------------------------------------------------------------

    @cached_property
    def processor(self) -> Any:
        """Tokenizer of the policy, or processor of a vision-language model."""
        model, data = self.config.model, self.config.data
        return load_tokenizer_or_processor(
            model.path, trust_remote_code=model.trust_remote_code, chat_template=data.chat_template
        )

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the policy."""
        return tokenizer_of(self.processor)

    def stage_options(self) -> StageArguments:
        """Return the arguments of every stage."""
        config = self.config
        return {
            "tokenizer": self.processor,
            "tokens_per_micro_batch": config.batch.tokens_per_micro_batch,
            "tokens_per_log_prob_batch": config.batch.tokens_per_log_prob_batch,
            "patches_per_micro_batch": config.batch.patches_per_micro_batch,
            "packing": config.batch.packing,
            "attention": config.model.attention,
            "trust_remote_code": config.model.trust_remote_code,
            "optimizer": config.optimizer,
            "gradient_checkpointing": config.model.gradient_checkpointing,
            "float8": config.model.float8,
            "lora": config.model.lora,
            "max_steps": config.run.steps,
        }

    def generation_options(self) -> GenerationArguments:
        """Return the arguments of stages that can generate responses, at least in validation."""
        validation = self.config.validation
        eval_sampling = replace(
            greedy(self.sampling()),
            num_samples=validation.samples_per_prompt,
            temperature=validation.temperature,
            top_p=validation.top_p,
            top_k=validation.top_k,
        )
        return {
            "scorer": self.scorer,
            "eval_sampling": eval_sampling,
            "environment": self.environment,
            "seed": self.config.run.seed,
        }

    def validation_options(self) -> ValidationArguments:
        """Return the arguments of validation: `generation_options`, or none if validation measures given responses."""
        if self.config.scores:
            return {**self.generation_options()}
        return {"scorer": None, "eval_sampling": None, "environment": None, "seed": self.config.run.seed}

    @cached_property
    def environment(self) -> AnyEnvironment:
        """Environment of the policy."""
        return self._open.enter_context(open_environment(self.config))

    def preference_options(self) -> PreferenceArguments:
        """Return the arguments of stages with a preference loss."""
        return {
            "loss": self.config.loss.name or "dpo",
            "loss_options": self.config.loss.options,
            "reference": self.config.reference.path,
            **self.validation_options(),
        }

    def sampling(self) -> SamplingConfig:
        """Return the options of sampling in training."""
        return SamplingConfig(**vars(self.config.sampling), num_samples=self.config.batch.samples_per_prompt)

    def reward_model(self) -> RewardModelConfig | None:
        """Return the settings of the reward model, if there is one."""
        return self._scoring(self.config.reward_model)

    def cost_model(self) -> RewardModelConfig | None:
        """Return the settings of the cost model, if there is one."""
        return self._scoring(self.config.cost_model)

    def _scoring(self, options: RewardModelOptions) -> RewardModelConfig | None:
        if options.path is None:
            return None
        return RewardModelConfig(**vars(options), max_failure_rate=self.config.reward.max_failure_rate)

    # Arguments of data modules ----------------------------------------------------------------------------------

    def training_data(self) -> Any:
        """Return the files, parts or data set of training."""
        return training_data(self.config)

    def data_options(self) -> DataOptions:
        """Return the arguments of every data module, without the training data."""
        config, data = self.config, self.config.data
        return {
            "validation": list(data.val_files) or None,
            "tokenizer": self.processor,
            "prompts_per_step": config.prompts_drawn,
            "max_train_rows": data.max_train_rows,
            "max_val_rows": data.max_val_rows,
            "eval_batch_size": data.eval_batch_size,
            "overlong_prompts": cast(FilterOrError, data.overlong_prompts),
            "bad_images": cast(FilterOrError, data.bad_images),
            "chat_template_kwargs": self.environment.template_options,
            "seed": config.run.seed,
            "shuffle": data.shuffle,
            "max_prompt_tokens": data.max_prompt_tokens,
        }

    # Training ---------------------------------------------------------------------------------------------------

    def callbacks(self) -> list[Callback]:
        """Return the callbacks of the run.

        The order is the divergence guard, changes of weights, checkpoints. So no checkpoint has diverged weights, and
        every checkpoint has all changes.
        """
        config, folder, run, guard = self.config, self.folder, self.config.run, self.config.guard
        kept_critics = {name: getattr(config, name).keep_checkpoints for name in (CRITIC, COST_CRITIC)}
        callbacks: list[Callback] = [
            DivergenceGuard(guard, action=guard.action, folder=folder.path, max_rollbacks=guard.max_rollbacks)
        ]
        if config.model.compile:
            callbacks.append(CompiledBlocks())
        if config.model.liger:
            callbacks.append(LigerKernels())
        if config.model.router_losses.active:
            callbacks.append(RouterLosses(config.model.router_losses.balance, config.model.router_losses.z))
        if config.debug.dump_rollouts:
            callbacks.append(RolloutDump(folder.rollouts, keep_last=config.debug.dump_rollouts))
        if config.debug.replay:
            callbacks.append(RolloutReplay(Path(config.debug.replay)))
        if config.reference.update_every:
            # Before the checkpoint callback, because a checkpoint contains the updated reference.
            callbacks.append(ReferenceUpdate(every=config.reference.update_every, keep=config.reference.keep))
        if config.teacher.update_every:
            callbacks.append(ReferenceUpdate(TEACHER, every=config.teacher.update_every, keep=config.teacher.keep))
        if config.average.keep:
            callbacks.append(PolicyAverage(keep=config.average.keep))
        callbacks.append(
            PolicyCheckpoint(
                folder.path,
                every=run.checkpoint_every,
                keep_last=run.keep_checkpoints,
                report_to_ray=self.in_ray,
                keep_models={name: kept for name, kept in kept_critics.items() if kept is not None},
                # Ranks that have written wait in a collective call for the others.
                background_deadline_s=config.strategy.collective_timeout_s / 2 if run.async_checkpoints else None,
            )
        )
        if run.keep_best:
            callbacks.append(
                BestCheckpoints(folder.path, metric=run.best_metric, mode=run.best_mode, keep=run.keep_best)
            )
        if config.tracking.enabled:
            # After the checkpoint callbacks, because the reference names their checkpoints.
            callbacks += [CheckpointReference(folder.path), RolloutTraces(config.tracking.traces), Curves(folder.path)]
            if config.tracking.upload_best:
                callbacks.append(best_upload(config, folder))
        if config.tracking.system_metrics:
            callbacks.append(SystemMetrics())
        callbacks += [
            GracefulStop(
                folder.path,
                time_limit_s=run.time_limit_s,
                started=self.started,
                # The launcher disables the watcher on a local Ray, whose nodes are never preempted.
                ray_notices=self.in_ray and os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER") != "0",
            ),
            Throughput(config.placement.peak_tflops),
            DataReport(run.name),
            SampleTable(folder.samples, rows=config.tracking.samples),
            RunReport(folder.path),
            StepProgress(run.steps, label=run.name, in_ray=self.in_ray, every_s=self.redraw_s),
        ]
        if run.target_reward is not None:
            callbacks.append(TargetReward(self.folder.path, run.target_reward))
        return [*callbacks, *instantiate_nodes("callbacks", config.callbacks, Callback)]

    def trainer(self) -> Trainer:
        """Return a trainer with the strategy, the callbacks and the loggers of the run.

        Epochs, validation and checkpoints follow the step of the stage.
        """
        config = self.config
        loggers: list[Any] = [JsonLinesLogger(self.folder.metrics)]
        if config.tracking.enabled:
            loggers.append(tracking_logger(config, self.folder))
        loggers += instantiate_nodes("tracking.loggers", config.tracking.loggers, Logger)
        profiler = config.debug.profiler
        validating = config.validates
        options: dict[str, Any] = {"precision": config.precision, **self.trainer_options}
        if options["precision"] == FLOAT16:
            # Lightning refuses the flag for FSDP2, and takes another precision on CPU.
            plugin = MixedPrecision(options.pop("precision"), "cuda" if config.on_gpus else "cpu")
            options["plugins"] = [*options.get("plugins", ()), plugin]
        return Trainer(
            strategy=self.strategy,
            logger=loggers,
            callbacks=self.callbacks(),
            profiler=instantiate_as("debug.profiler", profiler, Profiler) if profiler else None,
            # The stage stops after `run.steps` of its own steps.
            max_epochs=-1,
            val_check_interval=config.run.eval_every if validating else None,
            check_val_every_n_epoch=None if validating else 1,
            limit_val_batches=None if validating else 0,
            # Lightning's check before training, run in full, is the validation of the initial policy.
            num_sanity_val_steps=-1 if validating and config.run.eval_before else 0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            log_every_n_steps=1,
            deterministic=config.run.deterministic,
            **options,
        )

    def fit(self, trainer: Trainer, stage: Stage, data: StepDataModule[Any]) -> None:
        """Train, then export and register the trained model.

        After a request to stop, the run is only saved.

        Args:
            trainer: trainer of `trainer()`, with more callbacks if you like.
            stage: training method with its models.
            data: data of training and validation.

        Raises:
            DataError: no step was trained.
        """
        config = self.config
        self._connect_pools(stage)
        self.strategy.known_intact = self.checkpoint
        stage.validate_first = self._misses_validation()
        state = None if self.checkpoint is None else str(self.checkpoint / "state")
        # `weights_only` is a flag of torch.load, for files with plain data. Optimizer states are restored, too.
        trainer.fit(stage, datamodule=data, ckpt_path=state, weights_only=True)
        if any(isinstance(callback, GracefulStop) and callback.stopped for callback in callbacks_of(trainer)):
            return
        with failed_on_error(trainer.loggers):
            if stage.step == 0:
                raise DataError(
                    "training ended before its first step, so the run has made nothing: is there training data?"
                )
            if config.run.export:
                self._export(trainer, stage)
            if config.tracking.register_as and trainer.is_global_zero:
                for tracking in mlflow_loggers(trainer.loggers):
                    register(config, self.folder, stage.step, tracking)
            if trainer.is_global_zero:
                note_end(config, self.folder, stage.step)

    def _export(self, trainer: Trainer, stage: Stage) -> None:
        with ExitStack() as averaged:
            for callback in callbacks_of(trainer):
                if isinstance(callback, PolicyAverage):
                    averaged.enter_context(callback.swapped_in(trainer))
            stage.export(self.folder.path / stage.trained, adapter=self.config.run.export_lora == "adapter")

    def _misses_validation(self) -> bool:
        """Return True if the run was killed between the last checkpoint and the end of the validation of its step."""
        run = self.config.run
        if self.checkpoint is None or not self.config.validates:
            return False
        step = checkpoint_step(self.checkpoint)
        measured = (points for name, points in read_metrics(self.folder.metrics).items() if name.startswith("val/"))
        return (step % run.eval_every == 0 or step >= run.steps) and not any(step in points for points in measured)

    def _connect_pools(self, stage: Stage) -> None:
        for pool in self.pools:
            # A stage loads only the missing models.
            setattr(stage, pool.config.role, pool)
            if not isinstance(pool, CriticPool):
                role, trust = pool.config.role.replace("_", " "), pool.config.trust_remote_code
                check_same_tokens(self.tokenizer, pool.config.model, role, trust_remote_code=trust)
                stage.further_metrics.append(pool.metrics)
