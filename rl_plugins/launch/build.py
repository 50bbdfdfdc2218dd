"""From a configuration to Lightning objects. Runs in each training worker; imports what is heavy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from rl_plugins.callbacks.averages import PolicyAverage
from rl_plugins.callbacks.checkpoint import callbacks_of
from rl_plugins.callbacks.graceful_stop import GracefulStop
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.data.tokenization import load_tokenizer
from rl_plugins.launch.callbacks import build_callbacks
from rl_plugins.launch.quiet import quiet_libraries
from rl_plugins.launch.stages import build_data, build_stage
from rl_plugins.launch.tracking import register, tracking_logger
from rl_plugins.models.pool import ModelPool
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.scoring import Scorer
from rl_plugins.tracking.loggers import JsonLinesLogger, mlflow_loggers


def build_trainer(
    config: RecipeConfig,
    folder: RunFolder,
    strategy: Any,
    *,
    in_ray: bool,
    redraw_s: float,
    started: float,
    **trainer: Any,
) -> Trainer:
    """A Lightning trainer whose epochs, validation and checkpoints follow the stage's clock."""
    loggers: list[Any] = [JsonLinesLogger(folder.metrics)]
    if config.tracking.enabled:
        loggers.append(tracking_logger(config, folder))
    validating = config.validates
    return Trainer(
        strategy=strategy,
        precision=config.model.precision,  # type: ignore[arg-type]
        logger=loggers,
        callbacks=build_callbacks(config, folder, in_ray=in_ray, redraw_s=redraw_s, started=started),
        # The stage stops after `run.steps` steps of its own clock.
        max_epochs=-1,
        val_check_interval=config.run.eval_every if validating else None,
        check_val_every_n_epoch=None if validating else 1,
        limit_val_batches=None if validating else 0,
        # Lightning's check before training, run in full, is the validation of the starting point.
        num_sanity_val_steps=-1 if validating and config.run.eval_before else 0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        deterministic=config.run.deterministic,
        **trainer,
    )


def dtype_of(config: RecipeConfig) -> torch.dtype:
    """The dtype of a rollout engine's weights."""
    dtype: torch.dtype = getattr(torch, config.rollout_dtype)
    return dtype


def fit(
    config: RecipeConfig,
    folder: RunFolder,
    strategy: Any,
    scorer: Scorer | None,
    checkpoint: str | None,
    *,
    in_ray: bool,
    redraw_s: float,
    started: float,
    pools: Sequence[ModelPool] = (),
    **trainer: Any,
) -> None:
    """Build everything, validate the starting point if asked to, train, and export the policy."""
    quiet_libraries()
    seed_everything(config.run.seed, verbose=False)
    tokenizer = load_tokenizer(config.model.path)
    stage = build_stage(config, tokenizer, scorer, pools)
    data = build_data(config, tokenizer)
    lightning = build_trainer(config, folder, strategy, in_ray=in_ray, redraw_s=redraw_s, started=started, **trainer)
    state = None if checkpoint is None else str(Path(checkpoint) / "state")
    lightning.fit(stage, datamodule=data, ckpt_path=state, weights_only=False)
    callbacks = callbacks_of(lightning)
    stopped = any(isinstance(one, GracefulStop) and one.stopped for one in callbacks)
    if stopped:
        return
    if config.run.export:
        with ExitStack() as averaged:
            for one in callbacks:
                if isinstance(one, PolicyAverage):
                    averaged.enter_context(one.swapped_in(lightning))
            stage.export(folder.path / stage.trained, adapter=config.run.export_lora == "adapter")
    if config.tracking.register_as and lightning.is_global_zero:
        for tracking in mlflow_loggers(lightning.loggers):
            register(config, folder, tracking)
