"""Checkpoints in MLflow by reference: where each one is and what identifies it, not a copy of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.mlflow import MLflowTracking
from rl_plugins.callbacks.mlflow_run import TrackedRun
from rl_plugins.run_folder import RunFolder, checkpoint_step

_ENDS_BYTES = 2**20


class CheckpointReference(Callback):
    """Records each new checkpoint of a run: a file `checkpoints/step_00000050.json`, and tags for the newest.

    Comes after the callback that saves them.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)
        self._recorded: Path | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recorded = self._folder.latest_checkpoint()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
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
            for logger in trainer.loggers:
                if isinstance(logger, MLflowTracking):
                    logger.submit(lambda run: record_checkpoint(run, latest))


def record_checkpoint(run: TrackedRun, checkpoint: Path) -> None:
    """Say in the run where a checkpoint is and what it holds; one that is gone by now is left out."""
    if not checkpoint.is_dir():
        return
    manifest = checkpoint_manifest(checkpoint)
    step = checkpoint_step(checkpoint)
    reference = {"path": str(checkpoint), "step": step, "digest": manifest_digest(manifest), "files": manifest}
    run.client.log_dict(run.run_id, reference, f"checkpoints/step_{step:08d}.json")
    for name in ("path", "step", "digest"):
        run.client.set_tag(run.run_id, f"checkpoint.{name}", str(reference[name]))


def checkpoint_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Each file with its bytes and a digest; of one above 2 MiB the digest is that of its first and last MiB."""
    return {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "digest": _digest_of_ends(path)}
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }


def manifest_digest(manifest: dict[str, dict[str, Any]]) -> str:
    """One digest for the names, sizes and digests of all files."""
    lines = [f"{name} {file['bytes']} {file['digest']}\n" for name, file in sorted(manifest.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digest_of_ends(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_ENDS_BYTES))
        file.seek(max(file.tell(), path.stat().st_size - _ENDS_BYTES))
        digest.update(file.read())
    return digest.hexdigest()
