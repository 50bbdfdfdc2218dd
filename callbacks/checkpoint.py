"""Checkpoints on the stage's clock, with everything that a run needs to continue exactly.

Restarted workers and resumed runs look for checkpoints in the run's folder only; under Ray Train a checkpoint is also
reported. A resumed run writes one line about the restored states.

One checkpoint, in the order of the calls:

1. `PolicyCheckpoint` calls `CheckpointFiles.write`, which makes a `CheckpointWriter` for a temporary folder.
2. `_save_states` calls Lightning's `Trainer.save_checkpoint`, which calls `save_checkpoint` of the strategy.
3. The strategy gives the states of its model engines to the writer: shards, with ZeRO-3 through DeepSpeed.
4. `_save_states` gives random states, callbacks and the groups of later steps to the writer.
5. When all ranks have written, at once or in the background, the folder gets its final name.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.checkpoint_files import CheckpointFiles, old_files_may_stay, remove_folder, remove_model
from rl_plugins.data.loaders import StepLoader
from rl_plugins.errors import ConfigError
from rl_plugins.manifest import CheckpointWriter
from rl_plugins.models.remote import RemoteLearner
from rl_plugins.plain_file import load_plain
from rl_plugins.rewards.trajectory import RECORDS
from rl_plugins.run_folder import RunFolder, checkpoint_step
from rl_plugins.stages.clock import clock, step_metrics
from rl_plugins.stages.finite_weights import check_finite_weights
from rl_plugins.stages.stage import Stage
from rl_plugins.storage import local_path
from rl_plugins.strategies.contract import strategy_of
from rl_plugins.whole_file import append_text, only_printed


@runtime_checkable
class HasRankShares(Protocol):
    """A module with a state whose shares are spread over the ranks. Another number of ranks can load the shares."""

    def rank_share(self) -> object | None:
        """Return this rank's share, as plain values; None on every rank if the module has no such state."""

    def load_rank_shares(self, shares: list[Any], *, same_world_size: bool) -> str:
        """Restore the state; return the restored parts, in words.

        Args:
            shares: only this rank's share if `same_world_size`, else the shares of all ranks of the earlier run.
            same_world_size: True if as many ranks have saved the checkpoint as load it.
        """


@runtime_checkable
class HasRankState(Protocol):
    """A callback with a different state on every rank. Checkpoints hold the states of all ranks."""

    def rank_state(self) -> dict[str, Any]:
        """Return this rank's state, as plain values."""

    def load_rank_state(self, trainer: Trainer, state: dict[str, Any]) -> str:
        """Restore this rank's state, or start again from an empty state.

        Returns:
            The restored parts, in words; no words for an empty state.
        """


class PolicyCheckpoint(Callback):
    """Save a checkpoint every `every` steps and after the last step.

    Args:
        folder: folder of the run, never an address.
        every: number of steps between two checkpoints.
        keep_last: number of newest checkpoints to keep.
        report_to_ray: True if the workers run under Ray Train.
        keep_models: number of newest checkpoints with a certain model, by the name of the model. A smaller number than
            `keep_last` saves disk space: a sharded critic takes as much as the policy. A run can continue only from a
            checkpoint with all models.
        background_deadline_s: write checkpoints in the background: a step waits only for the copy of the states into
            host memory, and at most this number of seconds for the last checkpoint. Loggers get the seconds of each
            wait as `checkpoint/wait_s`. None lets the step wait for the disk.

    Attributes:
        files: checkpoints of this process, one after the other.
        saved_step: newest step whose checkpoint is in place or in the background, at first the step from which the run
            started; -1 before training.

    Example:
        Averages come before `PolicyCheckpoint`. Callbacks for saved checkpoints come behind `PolicyCheckpoint`::

            Trainer(callbacks=[PolicyAverage(keep=0.99), PolicyCheckpoint(folder, every=50), BestCheckpoints(folder)])
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int,
        keep_last: int = 2,
        report_to_ray: bool = False,
        keep_models: Mapping[str, int] | None = None,
        background_deadline_s: float | None = None,
    ) -> None:
        self._folder = RunFolder(local_path("folder", folder))
        self._every, self._keep_last = every, keep_last
        self._report_to_ray = report_to_ray
        self._keep_models = dict(keep_models or {})
        self.files = CheckpointFiles(background_deadline_s)
        self.saved_step = -1

    @classmethod
    def of(cls, trainer: Trainer) -> PolicyCheckpoint:
        """Return the `PolicyCheckpoint` among the callbacks of a trainer.

        Raises:
            ConfigError: the trainer has no `PolicyCheckpoint`.
        """
        for callback in callbacks_of(trainer):
            if isinstance(callback, cls):
                return callback
        raise ConfigError("a callback needs PolicyCheckpoint: add PolicyCheckpoint to Trainer(callbacks=[...])")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            # A killed process can leave half-written and half-removed folders.
            for unfinished in self._folder.unfinished():
                with old_files_may_stay(unfinished):
                    shutil.rmtree(unfinished)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saved_step = clock(pl_module)
        newest = trainer.strategy.broadcast(self._folder.latest_checkpoint())
        if newest is not None and checkpoint_step(newest) > self.saved_step:
            raise ConfigError(
                f"{self._folder.path} has {newest.name}, and this training starts at step {self.saved_step}: give "
                "another folder, move later checkpoints away, or continue from the newest one"
            )
        if trainer.ckpt_path:
            checkpoint = Path(trainer.ckpt_path).parent
            words = [self._load_random_state(trainer, checkpoint, self.saved_step)]
            words += load_rank_states(trainer, checkpoint)
            words += _load_rank_shares(trainer, checkpoint)
            if trainer.is_global_zero:
                self._report_resume(trainer, checkpoint, words)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self.files.advance()
        if clock(pl_module) % self._every == 0:
            self._save(trainer, pl_module)
        self._log_wait(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save_once(trainer, pl_module)
        self._log_wait(trainer, pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Other ranks may not have failed, so the ranks cannot put the checkpoint in place together.
        self.files.abandon()

    def save_once(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a checkpoint if this step has none, and wait until the checkpoint is in place. Collective."""
        self._save(trainer, pl_module)
        self.files.wait()

    def _save(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = clock(pl_module)
        if step == self.saved_step or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        final = self._folder.checkpoint(step)
        # When the checkpoint is in place, the metrics may be those of a later step.
        metrics = step_metrics(trainer, pl_module) | {"step": step} if self._report_to_ray else {}

        def then() -> None:
            if trainer.is_global_zero:
                self._remove_old()
            if self._report_to_ray:
                self._report(trainer, metrics, final)

        self.write(trainer, final, then=then)
        self.saved_step = step

    def write(
        self,
        trainer: Trainer,
        final: Path,
        notes: Mapping[str, str] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint, or begin to write it in the background. Collective.

        Args:
            trainer: trainer with the states.
            final: folder of the checkpoint.
            notes: text of further files, by the name of the file.
            then: action when the checkpoint is in place.

        Raises:
            TrainingDiverged: a trained weight is NaN or infinite. Nothing is written.
            StorageError: a rank cannot write a file of this checkpoint, or of the last one in the background.
        """
        self.files.wait()
        stage = trainer.lightning_module
        assert isinstance(stage, Stage)
        # The strategy has no optimizer of a model that learns in processes of its own.
        here, models = stage.optimizer_configs(), stage.named_models().items()
        trained = {name: model for name, model in models if name in here or isinstance(model, RemoteLearner)}
        check_finite_weights(strategy_of(trainer), trained, stage.step, final)
        self.files.write(trainer, final, partial(_save_states, trainer, notes or {}), then)

    def _remove_old(self) -> None:
        for model, num_kept in self._keep_models.items():
            for old in self._folder.checkpoints()[:-num_kept]:
                with old_files_may_stay(old):
                    remove_model(old, model)
        for old in self._folder.checkpoints()[: -self._keep_last]:
            with old_files_may_stay(old):
                remove_folder(old)

    def _log_wait(self, trainer: Trainer, pl_module: LightningModule) -> None:
        waited_s = self.files.waited_s()
        if self.files.deadline_s is not None and waited_s:
            for logger in trainer.loggers:
                logger.log_metrics({"checkpoint/wait_s": waited_s}, step=clock(pl_module))

    def _report(self, trainer: Trainer, metrics: dict[str, float], final: Path) -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        ray.train.report(
            metrics,
            checkpoint=Checkpoint.from_directory(str(final)) if trainer.is_global_zero else None,
            checkpoint_dir_name=final.name,
            # The checkpoint is already in the folder to which Ray would copy it.
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def _load_random_state(self, trainer: Trainer, checkpoint: Path, step: int) -> str:
        """Restore this rank's random state, or seed a new one if another number of ranks has saved the checkpoint."""
        files = list(checkpoint.glob("random_state_*.pt"))
        if len(files) != trainer.world_size:
            _seed_generators(step, trainer.global_rank)
            return f"random states start again (saved by {len(files)} workers, now {trainer.world_size})"
        state = load_plain(checkpoint / f"random_state_{trainer.global_rank}.pt")
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        device = trainer.strategy.root_device
        if device.type == "cuda" and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], device)
        return "random states"

    def _report_resume(self, trainer: Trainer, checkpoint: Path, words: list[str]) -> None:
        """Print one line about the restored states, and append the line to a file of the run's folder."""
        parts = [f"{model} ({states})" for model, states in strategy_of(trainer).restored.items()] + words
        loader = trainer.train_dataloader
        if isinstance(loader, StepLoader):
            parts.append(f"data from batch {loader.step}")
        elif not hasattr(loader, "load_state_dict"):
            parts.append("data from the beginning (its loader keeps no state)")
        line = f"{self._folder.path.name}: resumed from {checkpoint.name}: {', '.join(parts)}"
        print(line, flush=True)
        with only_printed():
            append_text(self._folder.resumes, line + "\n")


def finish_checkpoint(trainer: Trainer) -> None:
    """Wait until the checkpoint of the trainer's `PolicyCheckpoint` in the background is in place. Collective."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, PolicyCheckpoint):
            callback.files.wait()


def _save_states(trainer: Trainer, notes: Mapping[str, str], writer: CheckpointWriter) -> None:
    """Give all files of this rank to the writer of a checkpoint. Collective."""
    trainer.save_checkpoint(writer.folder / "state", weights_only=False, storage_options=writer)
    rank = trainer.global_rank
    writer.save(_random_state(trainer.strategy.root_device), writer.folder / f"random_state_{rank}.pt")
    states = {name: callback.rank_state() for name, callback in _with_rank_state(trainer).items()}
    if states:
        writer.save(states, writer.folder / f"callbacks_{rank}.pt")
    module: object = trainer.lightning_module
    share = module.rank_share() if isinstance(module, HasRankShares) else None
    if share is not None:
        writer.save(share, writer.folder / f"share_{rank}.pt", records=RECORDS)
    if trainer.is_global_zero:
        for name, text in notes.items():
            writer.save_text(text, writer.folder / name)


def _load_rank_shares(trainer: Trainer, checkpoint: Path) -> list[str]:
    files = sorted(checkpoint.glob("share_*.pt"), key=lambda file: int(file.stem.removeprefix("share_")))
    module: object = trainer.lightning_module
    if not files or not isinstance(module, HasRankShares):
        return []
    same_world_size = len(files) == trainer.world_size
    if same_world_size:
        files = [files[trainer.global_rank]]
    shares = [load_plain(file, records=RECORDS) for file in files]
    return [module.load_rank_shares(shares, same_world_size=same_world_size)]


def load_rank_states(trainer: Trainer, checkpoint: Path) -> list[str]:
    """Restore the states of callbacks on this rank; return the restored parts, in words. Collective."""
    number = len(list(checkpoint.glob("callbacks_*.pt")))
    # Copies of the shards repeat in the order of the ranks. Other shards have other shapes.
    states = load_plain(checkpoint / f"callbacks_{trainer.global_rank % number}.pt") if number else {}
    words = [
        callback.load_rank_state(trainer, states.get(name, {})) for name, callback in _with_rank_state(trainer).items()
    ]
    return [word for word in words if word]


def _with_rank_state(trainer: Trainer) -> dict[str, HasRankState]:
    return {callback.state_key: callback for callback in callbacks_of(trainer) if isinstance(callback, HasRankState)}


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of a trainer. Lightning's types do not declare the attribute."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _seed_generators(step: int, rank: int) -> None:
    """Seed all random generators from the run's seed, the step and the rank."""
    seeds = np.random.SeedSequence([torch.initial_seed(), step, rank]).generate_state(3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.manual_seed(seeds[2])


def _random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the CPU's generators, and of this worker's own device among the visible ones."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }
