"""The base of all stages: a model, one clock with metrics, and optimizer steps over micro-batches.

A batch of Lightning is one step of the stage's clock (`step`), however many optimizer steps it takes. Checkpoints,
evaluation, logging and schedules use this clock. Lightning's `global_step` counts optimizer steps and is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from typing_extensions import override

from rl_plugins.config.models import LoraConfig, OptimizerConfig
from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.data.image_prompts import tokenizer_of
from rl_plugins.data.tokenization import check_same_tokens
from rl_plugins.errors import ConfigError
from rl_plugins.models.dropout import turn_off_dropout
from rl_plugins.models.export import save_adapter, save_policy
from rl_plugins.models.loading import LoadingOptions, load_causal_lm, options_for
from rl_plugins.models.lora import MergedWeightSource, check_new_adapter, has_adapter, with_adapter
from rl_plugins.models.packed_attention import use_packed_attention
from rl_plugins.stages.finite_weights import check_finite_weights
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.metrics import metrics_of_update
from rl_plugins.stages.optimizer import (
    FurtherLoss,
    MicroBatchLoss,
    build_optimizer,
    optimizer_of_module,
    print_rates,
    step_schedules,
    with_further,
)
from rl_plugins.stages.own_module import OwnModel, call_hooks_of, check_schedules, stage_name, state_of_stage
from rl_plugins.stages.sampling import SamplingSetup, ShownSamples
from rl_plugins.stages.trainer_flags import TrainerFlags, leaves_rows_out
from rl_plugins.stages.validation import GenerationValidation
from rl_plugins.storage import local_path
from rl_plugins.strategies.contract import POLICY, REFERENCE, Strategy
from rl_plugins.vision_language import with_frozen_tower


class Stage(LightningModule):
    """Stage that trains one model (`trained`), and may train or run further models.

    `Trainer.fit` calls, in this order:

    1. `configure_callbacks` checks the flags of the trainer.
    2. `setup` makes the parts (`make_parts`). Models do not exist yet, so parts get functions such as
       `lambda: self.critic`.
    3. `configure_model` loads the models, in shards.
    4. `configure_optimizers` makes an optimizer for each trained model; the strategy makes the model engines.

    Attributes:
        step: number of finished steps.
        stale_metrics: names of metrics that earlier steps had, and the last finished step does not have.
        own_model: the model to train, as the user passed the model.
        passes: forward passes of the stage's models, since `setup`.
        sampling_setup: builder of sampler and scorer, in stages with validation by generation.
        validation: validation by generation, since `setup`.
        shown_samples: samples for callbacks.
        loading: options for models loaded by name.
        reference: frozen reference, in stages with a reference.
        validate_first: True if the next fit begins with a validation, which a killed run has not finished.
        further_metrics: functions of the metrics of a step, called on every rank; the results are added.
        further_losses: functions whose results are added to the loss of each micro-batch.

    Args:
        model: Hugging Face name or folder; a model with the forward of a Hugging Face causal language model; or a
            LightningModule with such a model as `.model`, since its constructor or `configure_model`. Its optimizers,
            hooks of training and hyperparameters are used; its steps, data loaders and hooks of validation are not.
        tokenizer: tokenizer, or processor of a vision-language model, or its folder or hub name; else the model's own.
        optimizer: settings of the optimizer, for models without `configure_optimizers`.
            `Trainer(gradient_clip_val=...)` replaces the bound on gradient norms of this and every other optimizer.
        gradient_checkpointing: recompute activations in the backward pass (models loaded by name).
        float8: `tensorwise` or `rowwise` for 8-bit products (models loaded by name); see `ModelConfig`.
        lora: train an adapter instead of the model (models loaded by name; other models may be peft models).
        max_steps: steps of the clock after which training stops; 0 for no bound.
        tokens_per_micro_batch: tokens of one forward and backward pass on one rank: real tokens with `packing`, padded
            tokens without. A pair of samples stays together.
        tokens_per_log_prob_batch: the same for passes without gradient, which need less memory; the same by default.
        patches_per_micro_batch: largest number of image patches in one pass of a vision-language model; a prompt with
            more patches gets passes of its own. No bound by default.
        packing: run the samples of a micro-batch as one row without padding. A model of transformers with `sdpa`
            attention is set to `packed_sdpa` (see `rl_plugins.models.packed_attention`), which also runs a prompt only
            once for all its samples in a micro-batch. A model in which packed samples influence each other is refused.
        attention: attention of transformers, such as `eager`; by default `packed_sdpa` (models loaded by name).
        trust_remote_code: run Python code that the config.json of a model names (`auto_map`), with all your rights.
    """

    trained: ClassVar[str] = POLICY
    """Name, and attribute, of the model that the stage trains."""
    compares_log_probs: ClassVar[bool] = False
    """True if the loss compares log-probs of the model with other log-probs. The stage then turns dropout off."""

    def __init__(
        self,
        model: str | nn.Module,
        *,
        tokenizer: Any = None,
        optimizer: OptimizerConfig | None = None,
        gradient_checkpointing: bool = False,
        float8: str | None = None,
        lora: LoraConfig | None = None,
        max_steps: int = 0,
        tokens_per_micro_batch: int = 16_384,
        tokens_per_log_prob_batch: int | None = None,
        patches_per_micro_batch: int | None = None,
        packing: bool = True,
        attention: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self.own_model = OwnModel(model, lora, type(self).__name__, compares_log_probs=self.compares_log_probs)
        self.automatic_optimization = False
        self.processor = self.own_model.tokenizer(tokenizer, trust_remote_code)
        self.tokenizer: Any = tokenizer_of(self.processor)
        self.optimizer_config = optimizer or OptimizerConfig()
        self.max_steps, self.packing = max_steps, packing
        self.tokens_per_micro_batch, self.patches_per_micro_batch = tokens_per_micro_batch, patches_per_micro_batch
        self.tokens_per_log_prob_batch = tokens_per_log_prob_batch or tokens_per_micro_batch
        self.step, self.validate_first, self._has_reference = 0, False, False
        self._metric_names, self.stale_metrics = set[str](), set[str]()
        self.reference: Any = None
        self.sampling_setup: SamplingSetup | None = None
        self.validation: GenerationValidation | None = None
        self.shown_samples = ShownSamples()
        setattr(self, self.trained, None)
        self.loading = LoadingOptions(
            gradient_checkpointing=gradient_checkpointing,
            float8=float8,
            attention=attention,
            trust_remote_code=trust_remote_code,
        )
        self._reference_path: str | None = None
        self._model_of_optimizer, self._stepped = dict[int, str](), set[str]()
        self.flags = TrainerFlags()
        self._strategy_of_parts: Strategy | None = None
        self.further_metrics: list[Callable[[Mapping[str, float]], Mapping[str, float]]] = []
        self.further_losses: list[FurtherLoss] = []
        if self.own_model.lightning_module is not None:
            call_hooks_of(self.own_model.lightning_module, self)

    @override
    def configure_callbacks(self) -> Any:
        # Lightning calls this hook before it reads data, and before it refuses flags in manual optimization.
        self.flags.take_over(self.trainer, self.optimizer_steps)
        return super().configure_callbacks()

    @override
    def setup(self, stage: str) -> None:
        self.flags.give_back(self.trainer, self.optimizer_steps)
        if self._strategy_of_parts is not self.strategy:
            self._strategy_of_parts = self.strategy
            self.make_parts(self.strategy)

    @property
    def optimizer_steps(self) -> int | None:
        """Number of optimizer steps in a step, for all trained models together; None if the number changes."""
        return 1

    def make_parts(self, strategy: Strategy) -> None:
        """Make the parts of the stage, once for each strategy."""
        self.passes = ForwardPasses(
            strategy,
            self.named_models,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            tokens_per_log_prob_batch=self.tokens_per_log_prob_batch,
            patches_per_micro_batch=self.patches_per_micro_batch,
            packing=self.packing,
            dtype=self.model_dtype,
            processor=self.processor,
        )
        if (setup := self.sampling_setup) is not None:
            self._sampler, self._scorer = setup.sampler(strategy), setup.scorer(strategy)
            self.validation = GenerationValidation(self._sampler, self._scorer, setup.eval_sampling)

    @property
    def strategy(self) -> Strategy:
        """The strategy of the trainer, which `configure_callbacks` has checked."""
        strategy: Strategy = self.trainer.strategy  # type: ignore[assignment]
        return strategy

    # Models -----------------------------------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        if getattr(self, self.trained) is None:
            vision_lr = self.optimizer_configs()[self.trained].vision_lr
            setattr(self, self.trained, with_frozen_tower(self._trained_model(), vision_lr))
        if self._has_reference and self.reference is None:
            self.reference = self._load_reference()

    def _trained_model(self) -> nn.Module:
        if self.own_model.path is not None:
            return with_adapter(self.load_model(self.own_model.path), self.own_model.lora)
        model = self.own_model.module(self.trainer, self.strategy.sharded_init)
        if self._has_reference and self._reference_path is None and has_adapter(model):
            check_new_adapter(model, self.strategy.ranks.any)
        if self.packing:
            use_packed_attention(model.get_base_model() if has_adapter(model) else model)
        if self.compares_log_probs:
            # `from_pretrained` returns a model in evaluation mode, in which transformers checkpoints no activations.
            turn_off_dropout(model.train())
        return model

    def load_model(self, path: str, frozen: str | None = None) -> nn.Module:
        """Load a causal language model in the precision of the trainer, sharded as the strategy shards it.

        Args:
            path: Hugging Face name or folder.
            frozen: name of the model, if it is frozen.
        """
        with self.strategy.sharded_init(frozen):
            model = load_causal_lm(path, dtype=self.model_dtype, **options_for(frozen, self.loading))
        if self.compares_log_probs:
            turn_off_dropout(model)
        return model

    def add_reference(self, path: str | None) -> bool:
        """Let `configure_model` load a frozen reference, and return True; return False if there is no model to load.

        Args:
            path: Hugging Face name or folder; by default, the reference is the trained model as it is at first.
        """
        self._reference_path = path
        self._has_reference = (path or self.own_model.path) is not None or self.own_model.comes_with_adapter
        return self._has_reference

    def _load_reference(self) -> nn.Module | None:
        """Load the reference; return None if the reference is the policy without its adapter."""
        path, policy, trust = self._reference_path, getattr(self, self.trained), self.loading["trust_remote_code"]
        if path not in (None, self.own_model.path):
            check_same_tokens(self.tokenizer, str(path), "reference", trust_remote_code=trust)
        lora = None if path else self.own_model.saved_adapter
        if not lora and has_adapter(policy) and path in (None, getattr(policy.get_base_model(), "name_or_path", None)):
            return None
        return with_adapter(self.load_model(str(path or self.own_model.path), REFERENCE), lora)

    @property
    def model_dtype(self) -> torch.dtype:
        """Dtype of the parameters that are loaded, from the trainer's `precision`."""
        dtype: torch.dtype = getattr(torch, dtype_of_passes(str(self.trainer.precision)))
        return dtype

    def named_models(self) -> dict[str, nn.Module]:
        """Return the models for the strategy's model engines, by name."""
        reference = {} if self.reference is None else {REFERENCE: self.reference}
        return {self.trained: getattr(self, self.trained), **reference}

    def optimizer_configs(self) -> dict[str, OptimizerConfig]:
        """Return the optimizer settings of each trained model; `trained` comes first."""
        return {self.trained: self.optimizer_config}

    def gradient_clip(self, name: str) -> float:
        """Return the bound on the global gradient norm of a model; 0 for no bound."""
        bound = self.flags.gradient_clip
        return self.optimizer_configs()[name].gradient_clip if bound is None else bound

    @override
    def configure_optimizers(self) -> Any:
        models = self.named_models()
        configured = []
        for name, config in self.optimizer_configs().items():
            own = self.own_model.optimizer_owner if name == self.trained else None
            if own is None:
                built = build_optimizer(config, models[name])
            else:
                built = optimizer_of_module(own, self.trainer, self.optimizer_steps)
            print_rates(built["optimizer"], name, own, trained=name == self.trained)
            self._model_of_optimizer[id(built["optimizer"])] = name
            configured.append(built)
        return configured

    # The step ---------------------------------------------------------------------------------------------------

    def optimize(self, losses: Iterable[MicroBatchLoss], name: str | None = None) -> None:
        """Accumulate the gradients of micro-batches and take one optimizer step.

        Lightning calls `backward` and `optimizer_step` of the strategy, and they call the model engine.

        Args:
            losses: scalar loss of each micro-batch, and True for the last one. The next loss is computed after the
                backward pass of the loss before.
            name: name of the model; `trained` by default.
        """
        name = name or self.trained
        for loss, last in losses:
            self.strategy.announce_backward(name, last=last)
            self.manual_backward(with_further(loss, self.further_losses, name, last=last), model_name=name)
        self._optimizer_of(name).step()
        self._stepped.add(name)

    def _optimizer_of(self, name: str) -> Any:
        optimizers = self.optimizers()
        return optimizers[self.strategy.optimizer_index(name)] if isinstance(optimizers, list) else optimizers

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """End a step: step the schedules, advance the clock, and log the metrics."""
        rates, strategy = dict[str, float](), self.strategy
        for name in sorted(self._stepped):
            prefix = "train" if name == self.trained else f"train/{name}"
            # The rate of this step, before the schedules set the rate of the next step.
            rate = float(self._optimizer_of(name).param_groups[0]["lr"])
            rates |= metrics_of_update(prefix, rate, strategy.gradient_norm(name), strategy.scale_of_loss(name))
        self.step += 1
        self._step_schedulers("step", self.step)
        self._stepped.clear()
        metrics = {**metrics, **rates, **strategy.phase_log.drain()}
        for further in self.further_metrics:
            metrics = {**metrics, **further(metrics)}
        self._stop_after_last_step()
        self._metric_names |= metrics.keys()
        self.stale_metrics = self._metric_names - metrics.keys()
        self.track(metrics)

    @override
    def on_train_start(self) -> None:
        self.own_model.log_hyperparameters(self.trainer)
        trainer, loop = self.trainer, self.trainer.fit_loop.epoch_loop.val_loop
        if self.strategy.ranks.any(self.validate_first) and trainer.enable_validation:
            # The checkpoint has the progress of an earlier validation.
            trainer.validating, loop.restarting = True, False
            loop.run()
            trainer.training = True
        self.validate_first = False
        # After a failure at the end of training, a run resumes from the checkpoint of its last step.
        self._stop_after_last_step()

    def _stop_after_last_step(self) -> None:
        if self.max_steps and self.step >= self.max_steps:
            self.trainer.should_stop = True

    @override
    def on_train_epoch_end(self) -> None:
        self._step_schedulers("epoch", self.trainer.current_epoch + 1)

    def _step_schedulers(self, interval: str, count: int) -> None:
        def is_trained(optimizer: object) -> bool:
            # A subclass may have made the optimizers.
            return self._model_of_optimizer.get(id(optimizer), self.trained) in self._stepped

        step_schedules(self.trainer.lr_scheduler_configs, interval, count, is_trained)

    def track(self, metrics: Mapping[str, float]) -> None:
        """Send metrics to callbacks and progress bars, and to every logger on the stage's clock.

        Loggers get the metrics of training every `Trainer(log_every_n_steps=...)` steps, and of the last step.
        """
        # `trainer.validate` and `trainer.test` return metrics that Lightning logs itself; a metric `step` is the axis.
        alone = self.trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING)
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_due = every > 0 and (self.step % every == 0 or self.trainer.should_stop)
        if alone:
            metrics = {**metrics, "step": float(self.step)}
        elif is_due if self.trainer.training else not leaves_rows_out(self.trainer):
            for logger in self.trainer.loggers:
                logger.log_metrics(dict(metrics), step=self.step)
                logger.save()
        for name, value in metrics.items():
            self.log(name, value, logger=alone)

    def export(self, folder: str | Path, *, adapter: bool = False) -> None:
        """Write the trained model and its tokenizer as a Hugging Face folder, if all weights are finite. Collective.

        Args:
            folder: folder to write; an older export in it is replaced.
            adapter: True to write only the adapter of a model, as peft does; by default it is merged into the model.

        Raises:
            ConfigError: there is no trained model yet, or `folder` is an address.
        """
        folder = local_path("folder", folder)
        if self._strategy_of_parts is None:
            raise ConfigError(f"{type(self).__name__}.export: nothing is trained: call trainer.fit(stage, ...) first")
        check_finite_weights(self.strategy, {self.trained: getattr(self, self.trained)}, self.step, folder)
        model, source = getattr(self, self.trained), self.strategy.weight_source(self.trained)
        if adapter and isinstance(source, MergedWeightSource):
            save_adapter(model, source.adapter(), self.processor, folder, self.trainer.is_global_zero)
        else:
            save_policy(model, source, self.processor, folder, self.trainer.is_global_zero)
        self.strategy.barrier("export")

    # Validation by generation -----------------------------------------------------------------------------------

    @override
    def on_validation_epoch_start(self) -> None:
        if self.validation is not None:
            self.validation.start()

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.validation is None:
            raise ConfigError(
                f"{type(self).__name__} got validation rows: pass scorer=... and eval_sampling=..., or leave rows out"
            )
        self.validation.add(batch, self.step)

    @override
    def on_validation_epoch_end(self) -> None:
        if self.validation is not None:
            self.track_validation(self.validation.metrics())
            self.shown_samples.validation = self.validation.rows

    def track_validation(self, metrics: Mapping[str, float]) -> None:
        """Log metrics and times of a validation as `val/<name>`, and of a test as `test/<name>`."""
        prefix = "test" if self.trainer.testing else "val"
        metrics = {**metrics, **self.strategy.phase_log.drain()}
        self.track({f"{prefix}/{name}": value for name, value in metrics.items()})

    # Test and prediction ----------------------------------------------------------------------------------------

    @override
    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    @override
    def test_step(self, batch: object, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    @override
    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    @override
    def predict_step(self, batch: object, batch_idx: int) -> list[dict[str, Any]]:
        """Answer prompts; return prompt, response, score and ground truth of each response of this rank.

        Raises:
            ConfigError: the stage generates no responses.
        """
        if self.validation is None:
            hint = "use trainer.validate or trainer.test, or give a stage of SFT or preferences a scorer"
            raise ConfigError(f"{type(self).__name__} generates no responses: {hint}")
        self.validation.start()
        self.validation.add(batch, self.step)  # type: ignore[arg-type]  # checks the batch itself
        return self.validation.rows

    # State ------------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["stage"] = {"stage": stage_name(self), "step": self.step}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.step = state_of_stage(checkpoint, self)["step"]
        # `load_from_checkpoint` has no trainer.
        # A subclass with its own `configure_optimizers` restores its own schedules.
        is_own = is_overridden("configure_optimizers", self, Stage)
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING and not is_own:
            own = int(self.own_model.optimizer_owner is not None)
            check_schedules(checkpoint, len(self.optimizer_configs()) - own, own)

    def restore(self, state: Path) -> None:
        """Go back to a checkpoint while training continues. Collective.

        The call restores weights, optimizers, schedules, clock and controllers, but no loop and no place in the data.

        Args:
            state: file or folder `state` of a checkpoint.
        """
        checkpoint = self.strategy.load_checkpoint(state)
        self.on_load_checkpoint(checkpoint)
        self.strategy.load_model_state_dict(checkpoint)
        if self.strategy.lightning_restore_optimizer:
            self.strategy.load_optimizer_state_dict(checkpoint)
        for config, saved in zip(self.trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)
        if self.step < self.max_steps:
            # The undone step may be the last step.
            self.trainer.should_stop = False
