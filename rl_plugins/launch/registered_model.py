"""Models named as `models:/NAME@ALIAS` or `models:/NAME/VERSION`: fetched from MLflow's registry before all else.

Fetched is what MLflow keeps of the transformers flavour, a Hugging Face folder. A version never changes, so it is
fetched once, beside the runs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.launch.config import RecipeConfig
from rl_plugins.launch.preflight import check_tracking, tracking_uri

_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


def resolve_registered_models(config: RecipeConfig) -> None:
    """Put folders in the place of registered models' names; the line that is said names the version.

    Raises:
        ConfigError: names the option; there is no such model, the store is away, or it is no transformers model.
    """
    for group in ("model", "reference", "teacher", "critic", "reward_model"):
        options = getattr(config, group)
        if options.path and options.path.startswith("models:"):
            cache = Path(config.run.output_dir) / ".models"
            named, options.path = options.path, str(fetch(f"{group}.path", options.path, tracking_uri(config), cache))
            print(f"{config.run.name}: {named} is {options.path}", flush=True)


def fetch(option: str, uri: str, store: str, cache: Path) -> Path:
    """The local folder of a registered model.

    Args:
        option: that names it, for messages.
        uri: its name.
        store: uri of the tracking store.
        cache: gets a folder for each version.

    Raises:
        ConfigError: see `resolve_registered_models`.
    """
    parts = _URI.fullmatch(uri)
    if parts is None:
        raise ConfigError(f"{option}={uri}: name a registered model as models:/NAME@ALIAS or models:/NAME/VERSION")
    file = Path(store.removeprefix("sqlite:///"))
    if store.startswith("sqlite:") and not file.is_file():
        raise ConfigError(f"{option}={uri}: there is no MLflow store {file}: name the one that has it by tracking.uri")
    check_tracking(store)
    from rl_plugins.callbacks.mlflow import quiet_mlflow
    from rl_plugins.callbacks.mlflow_run import use_store

    quiet_mlflow()
    import mlflow
    from mlflow.exceptions import MlflowException

    use_store(store)
    try:
        client, name = mlflow.MlflowClient(store), parts["name"]
        version = parts["version"] or str(client.get_model_version_by_alias(name, parts["alias"]).version)
        folder = cache / name / version
        if not folder.is_dir():
            partial = folder.with_name(f".{version}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            mlflow.artifacts.download_artifacts(f"models:/{name}/{version}", dst_path=str(partial))
            if not (partial / "model" / "config.json").is_file():
                raise ConfigError(f"{option}={uri}: version {version} is not a model of MLflow's transformers flavour")
            (partial / "model").replace(folder)
            shutil.rmtree(partial)
    except MlflowException as error:
        raise ConfigError(f"{option}={uri}: MLflow at {store} does not give it ({error.message})") from None
    return folder
