"""What every stage shares: a model, one clock, metrics on that clock, and optimizer steps over micro-batches.

A batch of Lightning is one step of the stage's clock (`step`), however many optimizer steps it takes. Checkpoints,
evaluation, logging and schedules use this clock; Lightning's `global_step` counts optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from typing_extensions import override

from rl_plugins.data.experience import Experience
from rl_plugins.data.tokenization import load_tokenizer
from rl_plugins.errors import ConfigError
from rl_plugins.models.export import save_adapter, save_policy
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.lora import LoraConfig, MergedWeightSource, adapted_layers, add_adapter, has_adapter
from rl_plugins.models.packed_attention import use_packed_attention
from rl_plugins.models.packing import shares_prompts
from rl_plugins.models.remote import RemoteModel
from rl_plugins.stages.micro_batches import Cutter
from rl_plugins.stages.optimizer import OptimizerConfig, only_one
from rl_plugins.stages.trainer_flags import check_trainer, take_gradient_clip
from rl_plugins.strategies.contract import POLICY

_DTYPES = {
    "64-true": torch.float64, "32-true": torch.float32, "16-true": torch.float16, "16-mixed": torch.float32
}  # fmt: skip


class StageOptions(TypedDict, total=False):
    """Arguments that every stage hands on to `Stage`."""

    tokenizer: Any
    optimizer: OptimizerConfig | None
    gradient_checkpointing: bool
    lora: LoraConfig | None
    max_steps: int
    tokens_per_micro_batch: int
    packing: bool


class Stage(LightningModule):
    """A stage that trains a model, the one it is about (`trained`), and perhaps others beside it.

    Attributes:
        further_metrics: called on every rank with the metrics of a step; what they give is added.

    Args:
        model: a Hugging Face name or folder, a model with the forward of a Hugging Face causal language model, or a
            LightningModule that holds one as `.model` (since its constructor or its `configure_model`), whose
            `configure_optimizers` is used. Its other hooks are not called.
        tokenizer: the one in the model's folder by default.
        optimizer: for models that do not bring their own. `Trainer(gradient_clip_val=...)` goes before its bound on
            gradient norms, and before that of every other engine.
        gradient_checkpointing: recompute activations (models loaded by name).
        lora: train an adapter in place of the model (models loaded by name; others may be peft models themselves).
        max_steps: steps of the clock after which training stops; 0 for no bound.
        tokens_per_micro_batch: tokens of one forward and backward pass on one rank: real ones with `packing`, padded
            ones without. What belongs together, such as a pair, is never split.
        packing: the samples of a micro-batch go through the models as one row without padding. A model of transformers
            that attends by `sdpa` is set to `packed_sdpa` (see `rl_plugins.models.packed_attention`), also one that is
            given as such, and runs a prompt only once for all its samples in a micro-batch; a model that lets packed
            samples see each other is refused.
    """

    trained: ClassVar[str] = POLICY
    """Name of the engine, and of the attribute, of the model that the stage is about."""

    def __init__(
        self,
        model: str | nn.Module,
        *,
        tokenizer: Any = None,
        optimizer: OptimizerConfig | None = None,
        gradient_checkpointing: bool = False,
        lora: LoraConfig | None = None,
        max_steps: int = 0,
        tokens_per_micro_batch: int = 16_384,
        packing: bool = True,
    ) -> None:
        super().__init__()
        if lora is not None and not isinstance(model, str):
            raise ConfigError(
                f"lora is for a model that is named, and this one is given as {type(model).__name__}: leave lora out, "
                "and wrap the model with peft.get_peft_model"
            )
        self.automatic_optimization = False
        self.tokenizer = tokenizer or _own_tokenizer(model)
        self.optimizer_config = optimizer or OptimizerConfig()
        self.max_steps = max_steps
        self.tokens_per_micro_batch, self.packing = tokens_per_micro_batch, packing
        self.step = 0
        setattr(self, self.trained, None)
        # In a list, so that nn.Module does not register it: its parameters are those of the trained model.
        self._source = [model]
        self._gradient_checkpointing, self._lora = gradient_checkpointing, lora
        self._engine_of_optimizer: dict[int, str] = {}
        self._stepped: set[str] = set()
        self._trainers_clip: float | None = None
        self.further_metrics: list[Callable[[Mapping[str, float]], Mapping[str, float]]] = []

    @override
    def configure_callbacks(self) -> Any:
        # The hook before Lightning refuses flags in manual optimization.
        check_trainer(self.trainer)
        self._trainers_clip = take_gradient_clip(self.trainer)
        return super().configure_callbacks()

    @override
    def teardown(self, stage: str) -> None:
        # For the next stage that the trainer is given.
        self.trainer.gradient_clip_val = self._trainers_clip

    # Models -----------------------------------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        if getattr(self, self.trained) is None:
            setattr(self, self.trained, self._own_model())

    def _own_model(self) -> nn.Module:
        source: Any = self._source[0]
        model = source
        if isinstance(source, str):
            model = self.load_model(source)
            return model if self._lora is None else add_adapter(model, self._lora)
        if isinstance(source, LightningModule):
            # Its configure_optimizers may ask the trainer for the number of steps.
            source.trainer = self.trainer
            with self.sharded_init():
                source.configure_model()
            model = getattr(source, "model", None)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{type(source).__name__} has no `.model` that is an nn.Module: there is no model to train"
            )
        if has_adapter(model):
            # Those that cannot be handled are refused before anything is trained.
            adapted_layers(model)
        if self.packing:
            use_packed_attention(model.get_base_model() if has_adapter(model) else model)
        return model

    def load_model(self, path: str, frozen: str | None = None) -> nn.Module:
        """Load a causal language model in the precision of the trainer, sharded as the strategy shards it.

        Args:
            path: Hugging Face name or folder.
            frozen: engine that it is for, if that is only run.
        """
        with self.sharded_init(frozen):
            return load_causal_lm(path, dtype=self.model_dtype, gradient_checkpointing=self._gradient_checkpointing)

    def sharded_init(self, frozen: str | None = None) -> AbstractContextManager[None]:
        """Models loaded inside are sharded as the strategy shards them, and the engine `frozen` that is only run."""
        strategy: Any = self.trainer.strategy
        context: AbstractContextManager[None] = (
            strategy.sharded_init(frozen) if hasattr(strategy, "sharded_init") else nullcontext()
        )
        return context

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of parameters that the trainer's `precision` asks for."""
        return _DTYPES.get(str(self.trainer.precision), torch.bfloat16)

    def engine_modules(self) -> dict[str, nn.Module]:
        """The models that the strategy makes engines of."""
        return {self.trained: getattr(self, self.trained)}

    def optimizer_configs(self) -> dict[str, OptimizerConfig]:
        """The optimizer of each engine that is trained; the first is the one that the stage is about."""
        return {self.trained: self.optimizer_config}

    def gradient_clip(self, engine: str) -> float:
        """Bound on the global gradient norm of an engine; 0 for no bound."""
        return self._bound_or(self.optimizer_configs()[engine])

    def _bound_or(self, config: OptimizerConfig) -> float:
        return config.gradient_clip if self._trainers_clip is None else self._trainers_clip

    @override
    def configure_optimizers(self) -> Any:
        models = self.engine_modules()
        source = self._source[0]
        brings_own = isinstance(source, LightningModule) and is_overridden("configure_optimizers", source)
        own = source if isinstance(source, LightningModule) and brings_own else None
        configured = []
        for name, config in self.optimizer_configs().items():
            if own is not None and name == self.trained:
                one = only_one(own.configure_optimizers(), own)
            else:
                one = config.adamw(p for p in models[name].parameters() if p.requires_grad)
            self._engine_of_optimizer[id(one["optimizer"])] = name
            configured.append(one)
        return configured

    # The step ---------------------------------------------------------------------------------------------------

    @property
    def cutter(self) -> Cutter:
        """How the stage cuts what a rank holds into micro-batches."""
        models = [model for model in self.engine_modules().values() if not isinstance(model, RemoteModel)]
        together = self.packing and all(map(shares_prompts, models))
        return Cutter(self.tokens_per_micro_batch, self.packing, together, self._strategy.max_over_ranks)

    def forward_inputs(self, samples: Experience) -> dict[str, Any]:
        """The arguments of a forward pass over the responses of samples."""
        return {
            "input_ids_BS": samples.input_ids,
            "attention_mask_BS": samples.attention_mask,
            "position_ids_BS": samples.position_ids,
            "response_width": samples.responses.shape[1],
            "packed": self.packing,
        }

    def optimize(self, losses: Iterable[tuple[Tensor, bool]], engine: str | None = None) -> None:
        """Accumulate the gradients of `(loss, is the last)` and take one optimizer step of an engine.

        Args:
            losses: scalars; the next is asked for after the backward pass of the one before.
            engine: `trained` by default.
        """
        engine = engine or self.trained
        for loss, last in losses:
            self._strategy.accumulate_gradients(engine, last=last)
            self.manual_backward(loss, engine=engine)
        self._optimizer_of(engine).step()
        self._stepped.add(engine)

    def _optimizer_of(self, engine: str) -> Any:
        optimizers = self.optimizers()
        return optimizers[self._strategy.optimizer_index(engine)] if isinstance(optimizers, list) else optimizers

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Schedules, metrics and the clock, once per step."""
        rates = {}
        for engine in sorted(self._stepped):
            prefix = "train" if engine == self.trained else f"train/{engine}"
            # The rate of this step, before the schedules set that of the next.
            rates[f"{prefix}/lr"] = float(self._optimizer_of(engine).param_groups[0]["lr"])
            norm = self._strategy.gradient_norm(engine)
            if norm is not None:
                rates[f"{prefix}/gradient_norm"] = norm
        self.step += 1
        self._step_schedulers("step", self.step)
        self._stepped.clear()
        metrics = {**metrics, **rates, **self._strategy.phases.drain()}
        for further in self.further_metrics:
            metrics = {**metrics, **further(metrics)}
        self.track(metrics)
        self._stop_after_last_step()

    @override
    def on_train_start(self) -> None:
        # A checkpoint of the last step is where a run goes on that failed after its training.
        self._stop_after_last_step()

    def _stop_after_last_step(self) -> None:
        if self.max_steps and self.step >= self.max_steps:
            self.trainer.should_stop = True

    @override
    def on_train_epoch_end(self) -> None:
        self._step_schedulers("epoch", self.trainer.current_epoch + 1)

    def _step_schedulers(self, interval: str, count: int) -> None:
        # What Lightning does by itself in automatic optimization only.
        for config in self.trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            if config.interval != interval or count % config.frequency:
                continue
            # The schedule of an engine that waits (a policy whose critic warms up) waits with it.
            if interval == "epoch" or self._engine_of_optimizer[id(scheduler.optimizer)] in self._stepped:
                scheduler.step()

    @property
    def _strategy(self) -> Any:
        return self.trainer.strategy

    def _phase(self, name: str) -> Any:
        return self._strategy.phases.measure(name)

    def track(self, metrics: Mapping[str, float]) -> None:
        """Send metrics to every logger on the stage's clock, and make them known to callbacks and progress bars."""
        # Of `trainer.validate` Lightning returns what it logs itself; it takes a metric `step` for the axis.
        alone = self.trainer.state.fn == TrainerFn.VALIDATING
        if alone:
            metrics = {**metrics, "step": float(self.step)}
        else:
            for logger in self.trainer.loggers:
                logger.log_metrics(dict(metrics), step=self.step)
        for name, value in metrics.items():
            self.log(name, value, logger=alone)

    def export(self, folder: Path, *, adapter: bool = False) -> None:
        """Write the trained model and its tokenizer as a Hugging Face folder. Collective.

        Args:
            folder: where; an older export there is replaced.
            adapter: of a model with an adapter, write that alone, as peft does; by default it is merged.
        """
        model, source = getattr(self, self.trained), self._strategy.weight_source(self.trained)
        if adapter and isinstance(source, MergedWeightSource):
            save_adapter(model, source.adapter(), self.tokenizer, folder, self.trainer.is_global_zero)
        else:
            save_policy(model, source, self.tokenizer, folder, self.trainer.is_global_zero)
        self._strategy.barrier("export")

    # State ------------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["stage"] = {"step": self.step}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.step = checkpoint["stage"]["step"]

    def restore(self, state: Path) -> None:
        """Go back to a checkpoint while training goes on. Collective.

        The engines get their weights, optimizers and schedules back, and the stage its clock and controllers.
        Lightning's loops and the position in the data stay where they are.

        Args:
            state: `state` of a checkpoint's folder.
        """
        checkpoint = self._strategy.load_checkpoint(state, weights_only=False)
        self.on_load_checkpoint(checkpoint)
        self._strategy.load_model_state_dict(checkpoint)
        if self._strategy.lightning_restore_optimizer:
            self._strategy.load_optimizer_state_dict(checkpoint)
        for config, saved in zip(self.trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)
        if self.step < self.max_steps:
            # The last step may have been the bad one.
            self.trainer.should_stop = False


def comes_with_adapter(model: str | nn.Module) -> bool:
    """Whether a model that is given to a stage has an adapter already; one that is made later is not known yet."""
    inner = getattr(model, "model", None) if isinstance(model, LightningModule) else model
    return isinstance(inner, nn.Module) and has_adapter(inner)


def clock(module: LightningModule) -> int:
    """The stage's clock.

    Raises:
        ConfigError: the module is not a stage.
    """
    if not isinstance(module, Stage):
        raise ConfigError(f"{type(module).__name__} is not a stage: this callback follows the clock of one")
    return module.step


def _own_tokenizer(model: str | nn.Module) -> Any:
    inner = getattr(model, "model", model)
    name = model if isinstance(model, str) else getattr(inner, "name_or_path", None)
    if not name:
        raise ConfigError(f"{type(model).__name__} does not say where it was loaded from: pass tokenizer=...")
    return load_tokenizer(name)
