"""Send the content of a run's folder to MLflow, after the run has ended."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from rl_plugins.callbacks.checkpoint_artifacts import record_checkpoint
from rl_plugins.callbacks.report import Curves
from rl_plugins.callbacks.samples import log_samples
from rl_plugins.config.recipe import RecipeConfig, parse_config, write_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch.preflight import tracking_uri
from rl_plugins.launch.tracking import best_upload, registration, tracking_logger
from rl_plugins.report.page import write_report
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tracking.loggers import MLflowTracking
from rl_plugins.tracking.run import TrackedRun
from rl_plugins.tracking.store import check_store, import_mlflow, open_client


def sync(path: Path, uri: str | None, deadline_s: float) -> bool:
    """Send the missing content of a run to the store.

    Args:
        path: Folder of the run.
        uri: URI of another store, to which the run moves. None keeps the run's own store.
        deadline_s: Seconds for the whole content.

    Returns:
        True if the store has everything.

    Raises:
        ConfigError: The configuration in the folder is broken, or the store does not answer.
    """
    folder = RunFolder(path)
    config = parse_config(OmegaConf.load(folder.config))
    check_store(uri or tracking_uri(config))
    if uri is not None and uri != tracking_uri(config):
        _check_is_mlflow(uri)
        _move_run(config, folder, uri)
    tracking = tracking_logger(config, folder)
    tracking.log_metrics({})
    must_register = bool(config.tracking.register_as) and folder.export.is_dir()
    registered = threading.Event()
    _submit_files(config, folder, tracking)
    if must_register:
        tracking.submit(partial(_register_once, config, folder, registered))
    steps = max((step for points in read_metrics(folder.metrics).values() for step in points), default=0)
    tracking.finalize("FINISHED" if steps >= config.run.steps else "KILLED", deadline_s)
    # The tracking logger has logged the refused calls.
    complete = tracking.all_sent() and registered.is_set() == must_register
    if complete:
        print(f"{tracking_uri(config)} has all of {path}, {steps} steps", flush=True)
    return complete


def _check_is_mlflow(uri: str) -> None:
    """Send a request to the store: another kind of server may answer at the address.

    Raises:
        ConfigError: The address is not the address of an MLflow store.
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


def _register_once(config: RecipeConfig, folder: RunFolder, registered: threading.Event, run: TrackedRun) -> None:
    """Register the policy, unless the run has registered the policy."""
    versions_of_run = f"name='{config.tracking.register_as}' and run_id='{run.run_id}'"
    if not run.client.search_model_versions(versions_of_run):
        registration(config, folder)(run)
    registered.set()
