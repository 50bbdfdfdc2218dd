"""Checkpoints in MLflow: a record of every checkpoint, and the files of the best checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.best_checkpoints import ranked_bests
from rl_plugins.manifest import MANIFEST, read_manifest
from rl_plugins.plain_file import read_record
from rl_plugins.run_folder import RunFolder, checkpoint_step
from rl_plugins.tracking.loggers import mlflow_loggers
from rl_plugins.tracking.run import TrackedRun
from rl_plugins.tracking.store import long_requests

_BEST_NAME = re.compile(r"best_\d{8}")
_UPLOADED_TAG = "uploaded."


class CheckpointReference(Callback):
    """Record each new checkpoint in MLflow: its path, its files and a digest, without a copy of the files.

    MLflow gets a file such as `checkpoints/step_00000050.json`, and tags for the newest checkpoint. Place this callback
    behind `PolicyCheckpoint`.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = RunFolder(folder)
        self._recorded: Path | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorded = self._folder.latest_checkpoint()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._record(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        latest = self._folder.latest_checkpoint()
        if latest is not None and latest != self._recorded:
            self._recorded = latest
            for logger in mlflow_loggers(trainer.loggers):
                logger.submit(lambda run: record_checkpoint(run, latest))


def record_checkpoint(run: TrackedRun, checkpoint: Path) -> None:
    """Record path, files and digest of a checkpoint in a run. Do nothing if the checkpoint was removed.

    Raises:
        CheckpointError: the manifest of the checkpoint is damaged.
    """
    digest = manifest_digest(checkpoint)
    if digest is None:
        return
    step, files = checkpoint_step(checkpoint), {name: asdict(kept) for name, kept in read_manifest(checkpoint).items()}
    reference = {"path": str(checkpoint), "step": step, "digest": digest, "files": files}
    run.client.log_dict(run.run_id, reference, f"checkpoints/step_{step:08d}.json")
    for name in ("path", "step", "digest"):
        run.client.set_tag(run.run_id, f"checkpoint.{name}", str(reference[name]))


def manifest_digest(checkpoint: Path) -> str | None:
    """Return a digest of the manifest, which has the digests of all files; None if the checkpoint was removed."""
    try:
        return read_record(checkpoint / MANIFEST).digest
    except FileNotFoundError:
        return None


class BestUpload(Callback):
    """Upload the best checkpoints of `BestCheckpoints` to MLflow, as artifacts of the run.

    Place this callback behind `BestCheckpoints`. Training does not wait for an upload; metrics wait in the queue behind
    the upload. `rl-plugins export` reads the downloaded artifacts of a run, because the configuration is an artifact
    too.

    Args:
        folder: folder of the run.
        metric: metric of `BestCheckpoints`.
        mode: mode of `BestCheckpoints`.
        count: number of checkpoints in MLflow, at most `keep` of `BestCheckpoints`.
    """

    def __init__(self, folder: str | Path, *, metric: str, mode: str, count: int) -> None:
        self._folder, self._metric, self._mode, self._count = RunFolder(folder), metric, mode, count
        # Time of each checkpoint: a repeated step replaces a checkpoint.
        self._submitted: dict[Path, int] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Complete the uploads of an earlier process.
        self._submit(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._submit(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._submit(trainer)

    def _submit(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        bests = {path: path.stat().st_mtime_ns for path in self._folder.bests()}
        if bests != self._submitted:
            self._submitted = bests
            for logger in mlflow_loggers(trainer.loggers):
                logger.submit(self.send)

    def send(self, run: TrackedRun) -> None:
        """Upload the best checkpoints at the time of the call."""
        upload_best(run, ranked_bests(self._folder, self._metric, self._mode)[: self._count])


def upload_best(run: TrackedRun, checkpoints: Sequence[Path]) -> None:
    """Make a run's artifacts hold these checkpoints and no others. Can be called again after an interruption.

    All other checkpoints, and incomplete uploads, are removed before an upload, so MLflow never has more checkpoints
    than `checkpoints`. A tag with the checkpoint's digest marks a complete upload.

    Args:
        run: run in MLflow.
        checkpoints: folders of the checkpoints.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    client, stored_run = run.client, run.client.get_run(run.run_id)
    tags = stored_run.data.tags
    complete = {key.removeprefix(_UPLOADED_TAG): tags[key] for key in tags if key.startswith(_UPLOADED_TAG)}
    wanted = {path.name: manifest_digest(path) for path in checkpoints}
    stored = {file.path for file in client.list_artifacts(run.run_id) if _BEST_NAME.fullmatch(file.path)}
    store = get_artifact_repository(stored_run.info.artifact_uri, tracking_uri=client.tracking_uri)
    for name in sorted(stored | complete.keys()):
        if name not in stored or name not in wanted or wanted[name] != complete.get(name):
            if name in complete:
                client.delete_tag(run.run_id, f"{_UPLOADED_TAG}{name}")
            store.delete_artifacts(name)
            complete.pop(name, None)
    for path in checkpoints:
        if path.name in complete:
            continue
        try:
            with long_requests():
                client.log_artifacts(run.run_id, str(path), path.name)
        except OSError:
            if path.is_dir():
                raise
        if not path.is_dir():
            # A better checkpoint has replaced this one. The callback has queued another call for the better one.
            return
        client.set_tag(run.run_id, f"{_UPLOADED_TAG}{path.name}", wanted[path.name])
