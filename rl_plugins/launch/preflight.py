"""Every check that needs neither Ray nor a model, cheap ones first. Each failure is one message.

What cannot be judged by looking at it (rewards, prompt lengths, the algorithm) is tried on samples, in `trials`.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlparse

from rl_plugins.errors import ConfigError
from rl_plugins.launch.batch import check_batch
from rl_plugins.launch.config import RecipeConfig
from rl_plugins.launch.job_folder import JOB_FOLDERS
from rl_plugins.launch.model_folder import check_model
from rl_plugins.launch.offload import check_offload
from rl_plugins.launch.resources import check_this_machine
from rl_plugins.launch.values import check_values
from rl_plugins.run_folder import RunFolder

_CONNECT_TIMEOUT_S = 3.0


def preflight(config: RecipeConfig) -> None:
    """Run every check.

    Raises:
        ConfigError: names the option, file or row at fault and the way out.
    """
    check_values(config)
    check_offload(config)
    check_batch(config)
    check_this_machine(config)
    check_model(config)
    _check_output(config)
    # That of a pipeline has answered when the parent run was made: if it is away now, that is an outage like others.
    if config.tracking.enabled and config.tracking.parent_run is None:
        check_tracking(tracking_uri(config))
    from rl_plugins.launch.trials import check_algorithm, check_pools, check_prompts

    check_prompts(config)
    if config.stage in ("policy_optimization", "prime"):
        check_algorithm(config)
        check_pools(config)


def tracking_uri(config: RecipeConfig) -> str:
    """The configured store, or the SQLite file beside the runs."""
    return config.tracking.uri or f"sqlite:///{Path(config.run.output_dir).absolute() / 'mlflow.db'}"


def _check_output(config: RecipeConfig) -> None:
    output, name = Path(config.run.output_dir), config.run.name
    if name in (".", "..") or Path(name).name != name:
        raise ConfigError(f"run.name={name}: must be the name of a folder; the folders above it are run.output_dir")
    if JOB_FOLDERS in output.parts:
        raise ConfigError(
            f"run.output_dir={output} is in the folder that Ray made for this job, and goes away with it: give an "
            "absolute path that all machines see"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.output_dir={output} cannot be written ({error.strerror}): choose another folder"
        ) from None
    folder = RunFolder(output / name)
    if config.run.resume:
        # A run that ended before its first checkpoint begins anew, as workers do that fail before it.
        if not folder.path.is_dir():
            raise ConfigError(f"run.resume=true, but there is no folder {folder.path}: start it without run.resume")
        if folder.exported() is not None and folder.latest_checkpoint() is None:
            raise ConfigError(
                f"run.resume=true, but {folder.path} is through and has no checkpoint any more: give another run.name"
            )
    elif folder.path.is_file() or (folder.path.is_dir() and any(folder.path.iterdir())):
        raise ConfigError(f"the run {folder.path} exists: continue it with run.resume=true, or give another run.name")


def check_tracking(uri: str) -> None:
    """Look for an MLflow store.

    Raises:
        ConfigError: no server answers at its address, or its file cannot be written.
    """
    url = urlparse(uri)
    if url.scheme in ("http", "https"):
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname or "", port), timeout=_CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tracking.uri={uri}: no server answers there ({getattr(error, 'strerror', None) or error}): start it "
                "(mlflow server), correct the address, or switch tracking off with tracking.enabled=false"
            ) from None
    elif url.scheme == "sqlite":
        folder = Path(uri.removeprefix("sqlite:///")).parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(
                f"tracking.uri={uri}: the folder {folder} does not exist or cannot be written: make it, or leave "
                "tracking.uri out for a file in run.output_dir"
            )
