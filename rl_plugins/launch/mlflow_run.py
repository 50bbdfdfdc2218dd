"""MLflow for a recipe's run: the logger, the description of the run, and the registration of the policy.

After the end of a run, `sync` sends the missing content of the run's folder.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from rl_plugins.callbacks.checkpoint_artifacts import BestUpload, record_checkpoint
from rl_plugins.callbacks.report import Curves
from rl_plugins.callbacks.samples import log_samples
from rl_plugins.config.recipe import (
    RecipeConfig,
    changed_options,
    dotted_options,
    public_options,
    read_config,
    write_config,
)
from rl_plugins.errors import ConfigError
from rl_plugins.launch.resume import noted_step
from rl_plugins.redaction import without_password
from rl_plugins.report.page import write_report
from rl_plugins.report.summary import read_samples
from rl_plugins.run_folder import RunFolder, count_damaged_lines, read_metrics
from rl_plugins.tracking.loggers import MLflowTracking, mlflow_loggers
from rl_plugins.tracking.provenance import describe_file, source_tags
from rl_plugins.tracking.registry import Evaluation, register_policy
from rl_plugins.tracking.run import RunDescription, TrackedRun
from rl_plugins.tracking.sender import FINISH_TIMEOUT_S, Call
from rl_plugins.tracking.store import check_store, import_mlflow, open_client

_COMPARED = (
    "stage", "model.path", "algorithm.advantage", "algorithm.policy_loss", "loss.name", "optimizer.lr",
    "batch.prompts_per_step", "batch.samples_per_prompt", "sampling.max_tokens", "sampling.temperature", "run.steps",
    "run.seed",
)  # fmt: skip
_REGISTER_TIMEOUT_S = 1800.0
# The other workers wait during the upload of the first worker.
_UPLOAD_TIMEOUT_S = 600.0


def tracking_logger(config: RecipeConfig, folder: RunFolder) -> MLflowTracking:
    """Return the MLflow logger of a run."""
    return MLflowTracking(
        uri=config.store_uri,
        experiment=config.tracking.experiment,
        folder=folder,
        description=describe_run(config, folder),
        finish_timeout_s=_UPLOAD_TIMEOUT_S if config.tracking.upload_best else FINISH_TIMEOUT_S,
    )


def describe_run(config: RecipeConfig, folder: RunFolder) -> RunDescription:
    """Return the description of a run: its parameters are options for the comparison of runs, and changed options."""
    changed = changed_options(config)
    params = {
        name: value
        for name, value in dotted_options(public_options(config))
        if name in changed or (name in _COMPARED and value is not None)
    }
    return RunDescription(
        params={**params, "workers": config.num_workers},
        tags={"run_folder": str(folder.path), **source_tags(folder)},
        files=(folder.config, folder.installed_packages, folder.git_state, folder.git_diff, folder.pinned_versions),
        data={
            "training": [Path(path) for path in config.data.training_files],
            "validation": [Path(path) for path in config.data.val_files],
        },
        parent_run=config.tracking.parent_run,
    )


def best_upload(config: RecipeConfig, folder: RunFolder) -> BestUpload:
    """Return the callback that uploads the best checkpoints."""
    run = config.run
    return BestUpload(folder.path, metric=run.best_metric, mode=run.best_mode, count=config.tracking.upload_best)


@contextmanager
def failed_on_error(loggers: Sequence[object]) -> Iterator[None]:
    """Give the ended MLflow runs of loggers the status FAILED after an error in the block."""
    try:
        yield
    except Exception:
        for tracking in mlflow_loggers(loggers):
            tracking.fail()
        raise


def register(config: RecipeConfig, folder: RunFolder, step: int, tracking: MLflowTracking) -> None:
    """Register the policy exported after `step` steps, and wait until MLflow has the policy."""
    tracking.submit(registration(config, folder, step))
    tracking.finalize("success", _REGISTER_TIMEOUT_S)


def registration(config: RecipeConfig, folder: RunFolder, step: int) -> Call:
    """Return a call that registers a policy as `tracking.register_as`, and prints the outcome.

    Args:
        config: options of the run.
        folder: folder of the run.
        step: number of steps before the export of the policy.
    """
    name, metric = str(config.tracking.register_as), config.tracking.champion_metric

    def send(run: TrackedRun) -> None:
        metrics = read_metrics(folder.metrics)
        # A value of another step says nothing about the exported policy.
        value = metrics.get(metric, {}).get(step)
        digests = [describe_file(Path(path)).digest for path in config.data.val_files]
        if (limit := config.data.max_val_rows) is not None:
            rows = sum(pq.read_metadata(path).num_rows for path in config.data.val_files)
            digests += [str(limit)] * (limit < rows)
        data = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]
        evaluation = Evaluation(metric, value, data)
        outcome = register_policy(run, folder.export, name, evaluation, _example_prompt(folder))
        print(f"{config.run.name}: {outcome}", flush=True)

    return send


def _last_step(metrics: Mapping[str, Mapping[int, float]]) -> int:
    return max((step for points in metrics.values() for step in points), default=0)


def _example_prompt(folder: RunFolder) -> str:
    """Return the first validation prompt, as the example for the registered model."""
    files = folder.sample_files()
    samples = read_samples(files[-1]) if files else None
    return str(samples[0]["prompt"]) if samples else "Hello"


def sync(path: Path, uri: str | None, deadline_s: float) -> bool:
    """Send the missing content of a run to the store.

    Args:
        path: folder of the run.
        uri: URI of another store, to which the run moves, or of the run's store with a password. None stands for the
            run's store.
        deadline_s: seconds for the whole content.

    Returns:
        True if the store has everything.

    Raises:
        ConfigError: a file of the folder is damaged, or the store does not answer.
    """
    folder = RunFolder(path)
    config = read_config(folder.config)
    check_store(uri or config.store_uri)
    if uri is not None:
        if without_password(uri) != without_password(config.store_uri):
            _check_is_mlflow(uri)
            _move_run(config, folder, uri)
        config.tracking.uri = uri
    tracking = tracking_logger(config, folder)
    tracking.log_metrics({})
    has_policy = bool(config.tracking.register_as) and folder.export.is_dir()
    exported_at = noted_step(folder) if has_policy else None
    registered = threading.Event()
    _submit_files(config, folder, tracking)
    if exported_at is not None:
        tracking.submit(partial(_register, config, folder, exported_at, registered))
    elif has_policy:
        # A continued run still has the export of its earlier end.
        print(f"{path}: the run is not finished, so sync registers no policy: run.resume=auto continues it", flush=True)
    steps = _last_step(read_metrics(folder.metrics))
    tracking.finalize(_status(config, folder, steps), deadline_s)
    # The tracking logger has logged the refused calls.
    complete = tracking.all_sent() and registered.is_set() == (exported_at is not None)
    if damaged := count_damaged_lines(folder.metrics):
        print(f"{folder.metrics}: {damaged} damaged lines are left out", flush=True)
    if complete:
        print(f"{without_password(config.store_uri)} has all of {path}, {steps} steps", flush=True)
    return complete


def _status(config: RecipeConfig, folder: RunFolder, steps: int) -> str:
    """Return MLflow's status of a run after a number of steps."""
    if folder.failed():
        return "FAILED"
    has_all = steps >= config.run.steps and (not config.run.export or folder.exported() is not None)
    return "FINISHED" if has_all or folder.finished.is_file() else "KILLED"


def _check_is_mlflow(uri: str) -> None:
    """Send a request to the store: another kind of server may answer at the address.

    Raises:
        ConfigError: the address is not the address of an MLflow store.
    """
    import_mlflow()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        open_client(uri).search_experiments(max_results=1)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise ConfigError(f"--uri {uri}: no MLflow store answers there ({str(error).splitlines()[0]})") from None


def _move_run(config: RecipeConfig, folder: RunFolder, uri: str) -> None:
    """Make the run a new run of another store."""
    config.tracking.uri = uri
    config.tracking.parent_run = None
    write_config(config, folder.config)
    folder.tracking_run.unlink(missing_ok=True)


def _submit_files(config: RecipeConfig, folder: RunFolder, tracking: MLflowTracking) -> None:
    """Submit all files that callbacks send during and after a run. Existing files in the store are replaced."""
    for file in folder.sample_files():
        log_samples(tracking, file)
    for checkpoint in folder.checkpoints():
        tracking.submit(partial(record_checkpoint, checkpoint=checkpoint))
    if config.tracking.upload_best:
        tracking.submit(best_upload(config, folder).send)
    if folder.metrics.is_file():
        tracking.submit(Curves(folder.path).send)
        tracking.submit(lambda run: run.client.log_artifact(run.run_id, str(write_report(folder))))


def _register(config: RecipeConfig, folder: RunFolder, step: int, registered: threading.Event, run: TrackedRun) -> None:
    registration(config, folder, step)(run)
    registered.set()
