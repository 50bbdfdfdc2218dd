"""Models in MLflow as local folders: of its registry (`models:/NAME@ALIAS`), or an artifact of a run.

Fetched is what MLflow keeps of the transformers flavour, or a Hugging Face folder. What a version or a run has does not
change, so it is fetched once: its folder has a digest of the store and of what the version was made from, because other
stores use the same names and numbers, and so does a name that was deleted and is given again.
"""

from __future__ import annotations

import re
import tempfile
from hashlib import sha256
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.launch.config import RecipeConfig
from rl_plugins.launch.preflight import check_tracking, tracking_uri

_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
_OF_RUN = re.compile(r"runs:/(?P<run>\w+)/(?P<path>.+)")
_DIGEST_LENGTH = 8


def is_in_mlflow(path: str) -> bool:
    """Whether a model is named by its place in MLflow."""
    return path.startswith(("models:", "runs:"))


def resolve_registered_models(config: RecipeConfig) -> None:
    """Put folders in the place of registered models' names; the line that is said names the version.

    Raises:
        ConfigError: names the option; there is no such model, the store is away, or it is no transformers model.
    """
    for group in ("model", "reference", "teacher", "critic", "reward_model"):
        options = getattr(config, group)
        if options.path and is_in_mlflow(options.path):
            cache = Path(config.run.output_dir) / ".models"
            named, options.path = options.path, str(fetch(f"{group}.path", options.path, tracking_uri(config), cache))
            print(f"{config.run.name}: {named} is {options.path}", flush=True)


def fetch(option: str, uri: str, store: str, cache: Path) -> Path:
    """The local folder of a model in MLflow.

    Args:
        option: that names it, for messages.
        uri: its name.
        store: uri of the tracking store.
        cache: gets a folder for each version.

    Raises:
        ConfigError: see `resolve_registered_models`.
    """
    registered, of_run = _REGISTERED.fullmatch(uri), _OF_RUN.fullmatch(uri)
    if registered is None and of_run is None:
        raise ConfigError(
            f"{option}={uri}: name a model in MLflow as models:/NAME@ALIAS, models:/NAME/VERSION or runs:/ID/FOLDER"
        )
    file = Path(store.removeprefix("sqlite:///"))
    if store.startswith("sqlite:") and not file.is_file():
        raise ConfigError(
            f"{option}={uri}: there is no MLflow store {file}: name the one that has it by MLFLOW_TRACKING_URI"
        )
    check_tracking(store)
    from rl_plugins.callbacks.mlflow_import import quiet_mlflow
    from rl_plugins.callbacks.mlflow_run import use_store

    quiet_mlflow()
    import mlflow
    from mlflow.exceptions import MlflowException

    use_store(store)
    try:
        if registered is not None:
            client, name = mlflow.MlflowClient(store), registered["name"]
            version = (
                client.get_model_version(name, registered["version"])
                if registered["version"]
                else client.get_model_version_by_alias(name, registered["alias"])
            )
            exact, made_from = f"models:/{name}/{version.version}", version.source
            folder = cache / name / str(version.version)
        else:
            assert of_run is not None
            exact, made_from = uri, of_run["run"]
            folder = cache / of_run["run"] / of_run["path"]
        digest = sha256(f"{store} {exact} {made_from}".encode()).hexdigest()[:_DIGEST_LENGTH]
        folder = folder.with_name(f"{folder.name}-{digest}")
        if not folder.is_dir():
            _download(f"{option}={uri}", exact, folder)
    except (MlflowException, OSError) as error:
        raise ConfigError(f"{option}={uri}: MLflow at {store} does not give it ({error})") from None
    return folder


def _download(named: str, exact: str, folder: Path) -> None:
    """Make the folder, whole or not at all, while other runs may do the same.

    Raises:
        ConfigError: what MLflow has is no model's folder.
    """
    import mlflow

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as partial:
        # Only its user may look into a temporary folder itself.
        place = Path(partial, "model")
        place.mkdir()
        fetched = Path(mlflow.artifacts.download_artifacts(exact, dst_path=str(place)))
        # MLflow's transformers flavour keeps the model in a folder of its own.
        found = next((one for one in (fetched / "model", fetched) if (one / "config.json").is_file()), None)
        if found is None:
            raise ConfigError(
                f"{named}: there is no config.json in {exact}, so it is neither a model of MLflow's transformers "
                "flavour nor a Hugging Face folder"
            )
        try:
            found.replace(folder)
        except OSError:
            # Another run was faster.
            if not folder.is_dir():
                raise
