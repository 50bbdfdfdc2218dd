"""Strategy, flags and callbacks of a trainer: a stage takes a flag over, or refuses the flag with the replacement."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch._dynamo import OptimizedModule

from rl_plugins.data.datamodule import StepDataModule
from rl_plugins.errors import ConfigError
from rl_plugins.strategies.contract import strategy_of

# The rollout engine would not find the renamed parameters.
_COMPILED = (
    "the {} is the result of torch.compile, which renames parameters and follows the code of a whole step: pass the "
    "object before torch.compile, and add rl_plugins.callbacks.compiled_blocks.CompiledBlocks() to the callbacks of "
    "the trainer"
)


_FAMILIES = ("train/", "val/", "time/", "memory/", "rollout/", "idle/", "throughput/")
"""Beginnings of the names of metrics of stages and of this package's callbacks."""
_HIDDEN_CLIP = "hidden_gradient_clip_val"


def check_not_compiled(model: object) -> None:
    """Refuse a model of `torch.compile`.

    Raises:
        ConfigError: the model, or the `.model` of a LightningModule, is compiled.
    """
    inner = getattr(model, "model", None) if isinstance(model, LightningModule) else None
    if isinstance(model, OptimizedModule) or isinstance(inner, OptimizedModule):
        raise ConfigError(_COMPILED.format("model"))


class TrainerFlags:
    """Checks of the trainer of a stage, and flags that the stage takes over.

    Attributes:
        gradient_clip: the trainer's bound on gradient norms; None if the trainer has none.
    """

    def __init__(self) -> None:
        self.gradient_clip: float | None = None
        self._checked: list[Callback] = []

    def take_over(self, trainer: Trainer, optimizer_steps: int | None) -> None:
        """Check the trainer before Lightning does, and hide flags that Lightning would refuse.

        Args:
            trainer: trainer of the stage.
            optimizer_steps: optimizer steps of one step of the stage; None if the number changes.

        Raises:
            ConfigError: the stage is compiled; see also `check_trainer` and `check_callbacks`.
        """
        check_trainer(trainer)
        if trainer.lightning_module._compiler_ctx is not None:
            raise ConfigError(_COMPILED.format("stage"))
        # A validation or a fit with other data has checked less.
        self._checked = []
        self._check_new_callbacks(trainer, optimizer_steps)
        silence_warnings()
        self.gradient_clip = hide_gradient_clip(trainer)

    def give_back(self, trainer: Trainer, optimizer_steps: int | None) -> None:
        """Give the trainer its hidden flags back, and check the callbacks of a module's own `configure_callbacks`.

        Args:
            trainer: trainer of the stage.
            optimizer_steps: optimizer steps of one step of the stage; None if the number changes.

        Raises:
            ConfigError: see `check_callbacks`.
        """
        show_gradient_clip(trainer)
        self._check_new_callbacks(trainer, optimizer_steps)

    def _check_new_callbacks(self, trainer: Trainer, optimizer_steps: int | None) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        check_callbacks(trainer, [one for one in callbacks if one not in self._checked], optimizer_steps)
        self._checked = [*callbacks]


def check_trainer(trainer: Trainer) -> None:
    """Refuse unsupported strategies and flags of the trainer, and a fit without training data.

    In manual optimization, Lightning itself would refuse some flags.

    Raises:
        ConfigError: the strategy or a flag is not supported, or training lacks its data; the message gives the
            replacement.
    """
    strategy_of(trainer)
    is_fitting = trainer.state.fn == TrainerFn.FITTING
    if is_fitting and not trainer.fit_loop._data_source.is_defined():
        raise ConfigError(
            "trainer.fit got a stage and no training data: pass a data module too, such as "
            "trainer.fit(stage, rl.PromptDataModule(files, ...))"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): a stage accumulates over its own "
            "micro-batches: leave the flag out, and bound their size with tokens_per_micro_batch"
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise ConfigError(
            "Trainer(gradient_clip_algorithm='value'): a stage clips by norm only: leave the flag out, or use 'norm'"
        )
    if overfit := trainer.overfit_batches:  # type: ignore[attr-defined]
        raise ConfigError(
            f"Trainer(overfit_batches={overfit}): the data module goes on to other rows in the next epoch: leave the "
            "flag out, and give the data module max_train_rows with the number of rows, or few rows"
        )


def check_callbacks(trainer: Trainer, callbacks: Iterable[Callback], optimizer_steps: int | None) -> None:
    """Refuse unsupported callbacks of Lightning.

    In manual optimization, some callbacks would do nothing. A callback that watches a metric gets a warning if no stage
    logs the metric.

    Args:
        trainer: trainer with the callbacks.
        callbacks: callbacks to check.
        optimizer_steps: optimizer steps of one step of the stage, as `Trainer.global_step` counts them; None if not all
            steps have the same number.

    Raises:
        ConfigError: a callback is not supported, or the metric of a callback lacks its data; the message gives the
            replacement.
    """
    is_fitting = trainer.state.fn == TrainerFn.FITTING
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} copies the whole module before its models are loaded and sharded, and the "
                "rollout engine would not see its weights: use rl.PolicyAverage"
            )
        if isinstance(callback, LearningRateFinder):
            raise ConfigError(
                "LearningRateFinder (Tuner.lr_find) compares the losses of single batches, and the loss of an RL step "
                "says nothing about progress: compare runs with other rates of OptimizerConfig(lr=...) (in a recipe: "
                "--multirun optimizer.lr=1e-6,1e-5)"
            )
        if isinstance(callback, BatchSizeFinder):
            raise ConfigError(
                "BatchSizeFinder (Tuner.scale_batch_size) changes batch_size, and memory follows the micro-batch: set "
                "tokens_per_micro_batch; rl-plugins plan estimates the memory"
            )
        if isinstance(callback, ModelCheckpoint | EarlyStopping) and is_fitting:
            _check_monitor(callback, validates=_validates(trainer))
        if isinstance(callback, ModelCheckpoint) and is_fitting:
            _check_moments(callback, optimizer_steps)


def _validates(trainer: Trainer) -> bool:
    """Return True if the trainer has data for validation, and does not leave validation out."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, StepDataModule) and not is_overridden("val_dataloader", data, StepDataModule):
        has_data = data.files["validation"] is not None
    else:
        has_data = trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
    return has_data and bool(trainer.limit_val_batches)


def _check_monitor(callback: ModelCheckpoint | EarlyStopping, *, validates: bool) -> None:
    shown = f"{type(callback).__name__}(monitor={callback.monitor!r}"
    if callback.monitor in ("train/reward", "val/reward") and callback.mode == "min":
        raise ConfigError(f"{shown}, mode='min') looks for the smallest reward: set mode='max'")
    if callback.monitor in ("val/reward", "val/loss") and not validates:
        raise ConfigError(
            f"{shown}) waits for a metric of validation, and trainer.fit does not validate: give the data module "
            "validation rows and leave out limit_val_batches=0, or monitor a metric of training such as train/reward"
        )
    if callback.monitor is not None and not callback.monitor.startswith(_FAMILIES):
        rank_zero_warn(
            f"{shown}): a stage logs no such metric, and does not call the steps of your own module. Unless a callback "
            "or a hook logs the metric, training ends at the first check: use a metric such as val/reward with "
            "mode='max', or val/loss of SFT"
        )


def _check_moments(callback: ModelCheckpoint, optimizer_steps: int | None) -> None:
    """Check the moments at which Lightning saves in manual optimization: `Trainer.global_step` must reach them."""
    if callback._train_time_interval is not None:
        raise ConfigError(
            "ModelCheckpoint(train_time_interval=...) saves nothing in manual optimization, which stages use: use "
            "rl.PolicyCheckpoint(folder, every=...), or ModelCheckpoint(every_n_train_steps=...)"
        )
    every = callback._every_n_train_steps
    if not every:
        return
    shown = f"ModelCheckpoint(every_n_train_steps={every}"
    if (callback.monitor or "").startswith("val/"):
        raise ConfigError(
            f"{shown}, monitor={callback.monitor!r}) saves before the validation of the same step, with the metric of "
            "an earlier validation: leave every_n_train_steps out, and Lightning saves after each validation; or use "
            "rl.BestCheckpoints"
        )
    if optimizer_steps is None and every > 1:
        reason = "and a step of this stage may take fewer (warm-up of a critic, or mini-batches without pairs): use"
    elif optimizer_steps is not None and every % optimizer_steps and optimizer_steps % every:
        reason = f"and a step of this stage takes {optimizer_steps}: use a multiple, or"
    else:
        return
    raise ConfigError(
        f"{shown}) counts optimizer steps of all models, {reason} rl.PolicyCheckpoint(folder, every=...), which counts "
        "the steps of the stage"
    )


def leaves_rows_out(trainer: Trainer) -> bool:
    """Return True in a sanity check of Lightning that leaves out rows of the validation."""
    return trainer.sanity_checking and sum(trainer.num_sanity_val_batches) < sum(trainer.num_val_batches)


def silence_warnings() -> None:
    """Silence two warnings that are wrong for a stage.

    Lightning advises to average metrics over the ranks, and a stage logs equal values on all ranks. Torch misses an
    optimizer step before the step of a schedule, also after a step that was left out for an overflow of float16.
    """
    message = r"It is recommended to use `self\.log\('(train|val|test)/"
    warnings.filterwarnings("ignore", message=message, category=PossibleUserWarning)
    warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before `optimizer\.step\(\)`")


def hide_gradient_clip(trainer: Trainer) -> float | None:
    """Return the trainer's bound on gradient norms, and hide the flag, which Lightning would refuse."""
    flags = vars(trainer)
    # A fit with an exception before `setup`, such as for missing data, has left the flag hidden.
    hidden = flags.get(_HIDDEN_CLIP)
    bound = hidden if trainer.gradient_clip_val is None else trainer.gradient_clip_val
    flags[_HIDDEN_CLIP], trainer.gradient_clip_val = bound, None
    return None if bound is None else float(bound)


def show_gradient_clip(trainer: Trainer) -> None:
    """Give a trainer its hidden flag back, after Lightning has verified the flags."""
    trainer.gradient_clip_val = vars(trainer).pop(_HIDDEN_CLIP, trainer.gradient_clip_val)
