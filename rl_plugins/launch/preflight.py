"""Every check that needs neither Ray nor a model, cheap ones first. Each failure is one message.

What cannot be judged by looking at it (rewards, prompt lengths, the algorithm) is tried on samples, in `trials`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.launch.batch import check_batch
from rl_plugins.launch.config import RecipeConfig
from rl_plugins.launch.job_folder import JOB_FOLDERS
from rl_plugins.launch.model_folder import check_model
from rl_plugins.launch.offload import check_offload
from rl_plugins.launch.resources import check_this_machine
from rl_plugins.launch.values import check_values
from rl_plugins.run_folder import RunFolder
from rl_plugins.tracking.registry import fetch_model, is_in_mlflow
from rl_plugins.tracking.store import check_store


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
        check_store(tracking_uri(config))
    from rl_plugins.launch.trials import check_algorithm, check_pools, check_prompts

    check_prompts(config)
    if config.stage in ("policy_optimization", "prime"):
        check_algorithm(config)
        check_pools(config)


def tracking_uri(config: RecipeConfig) -> str:
    """The configured store, or the SQLite file beside the runs."""
    return config.tracking.uri or f"sqlite:///{Path(config.run.output_dir).absolute() / 'mlflow.db'}"


def fetch_models(config: RecipeConfig) -> None:
    """Replace the paths of models in MLflow by local folders, and print each folder, whose name has the version.

    Raises:
        ConfigError: there is no such model, the store does not answer, or the model is in another format.
    """
    for group in ("model", "reference", "teacher", "critic", "reward_model"):
        options = getattr(config, group)
        if options.path and is_in_mlflow(options.path):
            cache = Path(config.run.output_dir) / ".models"
            uri, store = options.path, tracking_uri(config)
            options.path = str(fetch_model(f"{group}.path", uri, store, cache))
            print(f"{config.run.name}: {uri} is {options.path}", flush=True)


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
