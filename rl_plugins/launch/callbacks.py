"""Callbacks of a recipe in the necessary order."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping

from rl_plugins.callbacks.averages import PolicyAverage, ReferenceUpdate
from rl_plugins.callbacks.best_checkpoints import BestCheckpoints
from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.checkpoint_artifacts import CheckpointReference
from rl_plugins.callbacks.compiled_blocks import CompiledBlocks
from rl_plugins.callbacks.divergence_guard import DivergenceGuard
from rl_plugins.callbacks.graceful_stop import GracefulStop
from rl_plugins.callbacks.progress import DataReport, StepProgress
from rl_plugins.callbacks.report import Curves, RunReport
from rl_plugins.callbacks.rollout_dump import RolloutDump, RolloutReplay
from rl_plugins.callbacks.samples import RolloutTraces, SampleTable
from rl_plugins.callbacks.system_metrics import SystemMetrics
from rl_plugins.callbacks.throughput import Throughput
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.launch.tracking import best_upload
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.contract import CRITIC


def build_callbacks(
    config: RecipeConfig, folder: RunFolder, *, in_ray: bool, redraw_s: float, started: float
) -> list[Callback]:
    """Return the callbacks of a run.

    The order is the divergence guard, changes of weights, checkpoints. So no checkpoint has diverged weights, and every
    checkpoint has all changes.

    Args:
        config: Configuration of the run.
        folder: Folder of the run.
        in_ray: True in a worker of Ray Train.
        redraw_s: Seconds between two updates of the progress bar; 0 prints lines instead of a bar.
        started: Start of the run in seconds since 1970.
    """
    run = config.run
    callbacks: list[Callback] = [_guard(config, folder)]
    if config.model.compile:
        callbacks.append(CompiledBlocks())
    if config.debug.dump_rollouts:
        callbacks.append(RolloutDump(folder.rollouts, keep_last=config.debug.dump_rollouts))
    if config.debug.replay:
        callbacks.append(RolloutReplay(Path(config.debug.replay)))
    if config.reference.update_every:
        # Before the checkpoint callback, because a checkpoint contains the updated reference.
        callbacks.append(ReferenceUpdate(every=config.reference.update_every, keep=config.reference.keep))
    if config.average.keep:
        callbacks.append(PolicyAverage(keep=config.average.keep))
    callbacks.append(
        PolicyCheckpoint(
            folder.path,
            every=run.checkpoint_every,
            keep_last=run.keep_checkpoints,
            report_to_ray=in_ray,
            keep_models={CRITIC: config.critic.keep_checkpoints} if config.critic.keep_checkpoints else {},
        )
    )
    if run.keep_best:
        callbacks.append(BestCheckpoints(folder.path, metric=run.best_metric, mode=run.best_mode, keep=run.keep_best))
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
            started=started,
            # The launcher disables the watcher on a local Ray, whose nodes are never preempted.
            ray_notices=in_ray and os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER") != "0",
        ),
        Throughput(config.placement.peak_tflops),
        DataReport(run.name),
        SampleTable(folder.samples, rows=config.tracking.samples),
        RunReport(folder.path),
        StepProgress(run.steps, label=run.name, in_ray=in_ray, every_s=redraw_s),
    ]
    if run.target_reward is not None:
        callbacks.append(
            EarlyStopping(
                "val/reward",
                mode="max",
                stopping_threshold=run.target_reward,
                patience=run.steps,
                check_on_train_epoch_end=False,
            )
        )
    return callbacks


def _guard(config: RecipeConfig, folder: RunFolder) -> DivergenceGuard:
    guard = config.guard
    return DivergenceGuard(guard, action=guard.action, folder=folder.path, max_rollbacks=guard.max_rollbacks)
