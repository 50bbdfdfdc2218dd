"""The best checkpoints in MLflow, as artifacts of the run: so many and never more, whatever is interrupted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.best_checkpoints import ranked_bests
from rl_plugins.callbacks.checkpoint_reference import checkpoint_manifest, manifest_digest
from rl_plugins.callbacks.mlflow import MLflowTracking
from rl_plugins.callbacks.mlflow_run import TrackedRun
from rl_plugins.run_folder import RunFolder

_NAME = re.compile(r"best_\d{8}")
_TAG = "uploaded."


class BestUpload(Callback):
    """Sends the best of what `BestCheckpoints` keeps, and comes after it.

    Nothing waits for it but the metrics that are measured meanwhile. A run's configuration is an artifact too, so what
    is downloaded of a run is a folder that `rl-plugins export` understands.

    Args:
        folder: of the run.
        metric: as of `BestCheckpoints`.
        mode: as of `BestCheckpoints`.
        count: how many are in MLflow, at most as many as are kept.
    """

    def __init__(self, folder: Path, *, metric: str, mode: str, count: int) -> None:
        self._folder, self._metric, self._mode, self._count = RunFolder(folder), metric, mode, count
        self._sent: list[Path] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What a process before this one has begun.
        self._submit(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._submit(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._submit(trainer)

    def _submit(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and (bests := self._folder.bests()) != self._sent:
            self._sent = bests
            for logger in trainer.loggers:
                if isinstance(logger, MLflowTracking):
                    logger.submit(self.send)

    def send(self, run: TrackedRun) -> None:
        """Have the run hold those that are the best now."""
        hold(run, ranked_bests(self._folder, self._metric, self._mode)[: self._count])


def hold(run: TrackedRun, best: Sequence[Path]) -> None:
    """Upload what the run lacks of these checkpoints, after removing all others, and those that are not whole.

    A tag says of each that it is whole, and what it is.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    client, known = run.client, run.client.get_run(run.run_id)
    whole = {key.removeprefix(_TAG): tag for key, tag in known.data.tags.items() if key.startswith(_TAG)}
    wanted = {path.name: manifest_digest(checkpoint_manifest(path)) for path in best}
    there = {file.path for file in client.list_artifacts(run.run_id) if _NAME.fullmatch(file.path)}
    store = get_artifact_repository(known.info.artifact_uri, tracking_uri=client.tracking_uri)
    for name in sorted(there | whole.keys()):
        if name not in there or name not in wanted or wanted[name] != whole.get(name):
            if name in whole:
                client.delete_tag(run.run_id, f"{_TAG}{name}")
            store.delete_artifacts(name)
            whole.pop(name, None)
    for path in best:
        if path.name in whole:
            continue
        try:
            client.log_artifacts(run.run_id, str(path), path.name)
        except OSError:
            if path.is_dir():
                raise
        if not path.is_dir():
            # A better one has taken its place meanwhile, for which there is another call.
            return
        client.set_tag(run.run_id, f"{_TAG}{path.name}", wanted[path.name])
