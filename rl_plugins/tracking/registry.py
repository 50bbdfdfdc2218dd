"""Models in MLflow: register an exported policy as a version of a name, and fetch a model into a local folder.

The best version of a registered model has the alias `champion`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from rl_plugins.errors import ConfigError
from rl_plugins.owned_folder import owned_in_context
from rl_plugins.tracking.provenance import describe_file
from rl_plugins.tracking.run import TrackedRun
from rl_plugins.tracking.store import check_store, import_mlflow, long_requests, open_client, sqlite_file, use_store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models.model import ModelInfo

CHAMPION = "champion"
_DATA_TAG = "evaluated_on"
_WEIGHTS_TAG = "weights"
_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
_LOGGED = re.compile(r"models:/m-\w+")
_IN_RUN = re.compile(r"runs:/(?P<run>\w+)/(?P<path>.+)")
_DIGEST_LENGTH = 8


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of a policy, for the comparison with the champion.

    Attributes:
        metric: name of a metric for which more is better.
        value: value of the metric; None if the run has not measured the metric.
        data: identifier of the validation data. Values on different data are not compared.
    """

    metric: str
    value: float | None
    data: str


def register_policy(run: TrackedRun, policy: Path, name: str, evaluation: Evaluation, example: str) -> str:
    """Log a Hugging Face folder as a model of the run, and register the model.

    A policy that the run has registered with the same evaluation gets no second version, also with tags of a user.

    Args:
        run: run of the policy.
        policy: folder of the policy.
        name: name of the registered model; a missing model is created.
        evaluation: evaluation of the policy, for the comparison with the champion.
        example: text of a user message, stored as the model's input example.

    Returns:
        The version and the outcome of the comparison, in words.
    """
    from mlflow.exceptions import MlflowException

    client = run.client
    tags = {_DATA_TAG: evaluation.data, _WEIGHTS_TAG: _digest(policy)}
    if evaluation.value is not None:
        tags[evaluation.metric] = repr(evaluation.value)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # After an interrupted call or another call, the store can already have the version.
    versions = client.search_model_versions(f"name='{name}' and run_id='{run.run_id}'")
    version = next((found for found in versions if tags.items() <= found.tags.items()), None)
    if version is None:
        logged = _log_model(run, policy, example)
        version = client.create_model_version(name, logged.model_uri, run.run_id, tags=tags, model_id=logged.model_id)
    champion = _champion(run, name)
    if champion is not None and champion.version == version.version:
        return f"{name} version {version.version}, the champion: registered before"
    wins, reason = compare(evaluation, None if champion is None else champion.tags)
    if wins:
        client.set_registered_model_alias(name, CHAMPION, version.version)
    return f"{name} version {version.version}, {'the' if wins else 'not the'} champion: {reason}"


def compare(evaluation: Evaluation, champion: Mapping[str, str] | None) -> tuple[bool, str]:
    """Compare a policy with the champion.

    Args:
        evaluation: evaluation of the policy.
        champion: tags of the champion's version; None if there is no champion.

    Returns:
        True if the policy becomes the champion, and the reason.
    """
    metric, value = evaluation.metric, evaluation.value
    if value is None:
        return False, f"the run has no {metric}"
    if champion is None:
        return True, f"the first one, {metric} {value:.4g}"
    if metric not in champion:
        return False, f"the champion has no {metric} to compare with"
    if champion.get(_DATA_TAG) != evaluation.data:
        return False, f"the champion's {metric} is of other data"
    best = float(champion[metric])
    return value > best, f"{metric} {value:.4g} against {best:.4g}"


def _digest(policy: Path) -> str:
    """Return a digest of the weights: a run that goes on exports another policy, perhaps with an equal evaluation."""
    digests = [f"{file.name} {describe_file(file).digest}" for file in sorted(policy.glob("*.safetensors"))]
    return sha256(" ".join(digests).encode()).hexdigest()[:_DIGEST_LENGTH]


def _champion(run: TrackedRun, name: str) -> ModelVersion | None:
    version = run.client.get_registered_model(name).aliases.get(CHAMPION)
    return None if version is None else run.client.get_model_version(name, version)


def _log_model(run: TrackedRun, policy: Path, example: str) -> ModelInfo:
    import mlflow

    # MLflow looks for the model card of every folder on the hub, and warns about a missing card.
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    with long_requests(), mlflow.start_run(run.run_id):
        return mlflow.transformers.log_model(
            # MLflow takes a relative path for a name on the hub.
            str(policy.absolute()),
            name=policy.name,
            # The input is chat messages, rendered with the chat template of training. The output is the answer.
            task="llm/v1/chat",
            input_example={"messages": [{"role": "user", "content": example}]},
            pip_requirements=[f"{name}=={importlib.metadata.version(name)}" for name in ("transformers", "torch")],
        )


def is_in_mlflow(path: str) -> bool:
    """Return True if a model's path is a URI of MLflow (`models:/...` or `runs:/...`)."""
    return path.startswith(("models:", "runs:"))


def fetch_model(option: str, uri: str, store: str, cache: Path) -> Path:
    """Return the local folder of a model in MLflow; download a model missing in the cache.

    The model is a registered model (`models:/NAME@ALIAS`, `models:/NAME/VERSION`) or an artifact of a run
    (`runs:/ID/FOLDER`), in MLflow's transformers flavour or as a Hugging Face folder. A version does not change, so one
    download is enough. The folder's name ends with a digest of the store and of the origin: other stores use the same
    names and versions, a model created again under a deleted name does too, and a run that logs another model gives
    the newest model. Files of a run that belong to no model count as unchanged.

    Args:
        option: name of the option with the URI, for error messages.
        uri: URI of the model.
        store: address of the MLflow store.
        cache: parent folder of the downloaded models.

    Raises:
        ConfigError: the URI is malformed, there is no such model, the store does not answer, or the model is in
            another format.
    """
    uri = resolve_model(option, uri, store)
    with _answers(option, uri, store):
        # The URI without its scheme is a version, a model's id or an artifact, as a path.
        folder = cache / uri.partition(":/")[2]
        client = open_client(store)
        origin: str | None = None
        if (registered := _REGISTERED.fullmatch(uri)) is not None:
            origin = client.get_model_version(registered["name"], registered["version"]).source
        elif (in_run := _IN_RUN.fullmatch(uri)) is not None:
            origin = _models_of_run(client, in_run["run"])
        digest = sha256(f"{store} {uri} {origin}".encode()).hexdigest()[:_DIGEST_LENGTH]
        folder = folder.with_name(f"{folder.name}-{digest}")
        if not folder.is_dir():
            _download(f"{option}={uri}", uri, folder)
    return folder


def _models_of_run(client: MlflowClient, run_id: str) -> str:
    """Return the ids of the models that a run has logged."""
    outputs = client.get_run(run_id).outputs
    return " ".join(sorted(model.model_id for model in outputs.model_outputs)) if outputs else ""


def resolve_model(option: str, uri: str, store: str) -> str:
    """Return the URI of a model in MLflow that names the same model for ever.

    An alias gets its version. The name of a model in a run gets the id of the newest model of this name: the run may
    log another one later. Other URIs stay as they are.

    Args:
        option: name of the option with the URI, for error messages.
        uri: URI of the model.
        store: address of the MLflow store.

    Raises:
        ConfigError: the URI is malformed, there is no such alias or run, or the store does not answer.
    """
    registered, in_run = _REGISTERED.fullmatch(uri), _IN_RUN.fullmatch(uri)
    # Each part is a folder of the cache.
    leaves_cache = {"", ".", ".."} & {*uri.partition(":/")[2].partition("@")[0].split("/")}
    if not (registered or in_run or _LOGGED.fullmatch(uri)) or leaves_cache or not uri.isprintable():
        raise ConfigError(
            f"{option}={uri}: name a model in MLflow as models:/NAME@ALIAS, models:/NAME/VERSION or runs:/ID/FOLDER"
        )
    if (file := sqlite_file(store)) is not None and not file.is_file():
        raise ConfigError(
            f"{option}={uri}: there is no MLflow store {file}: name the one that has it by MLFLOW_TRACKING_URI"
        )
    check_store(store)
    with _answers(option, uri, store):
        if registered is not None and registered["alias"]:
            version = open_client(store).get_model_version_by_alias(registered["name"], registered["alias"])
            return f"models:/{registered['name']}/{version.version}"
        # A path of several folders is no name of a model.
        if in_run is not None and "/" not in in_run["path"]:
            return _logged_model(open_client(store), in_run["run"], in_run["path"]) or uri
    return uri


def _logged_model(client: MlflowClient, run_id: str, name: str) -> str | None:
    """Return the URI of the newest model of a run with a name.

    None for files which belong to no model, and for a store without models of runs: MLflow then takes the files.
    """
    from mlflow.exceptions import MlflowException

    experiment, token = client.get_run(run_id).info.experiment_id, None
    newest_first = [{"field_name": "creation_timestamp", "ascending": False}]
    while True:
        try:
            # Some stores cannot filter by run.
            page = client.search_logged_models(
                [experiment], filter_string=f"name = '{name}'", order_by=newest_first, page_token=token
            )
        except (MlflowException, NotImplementedError):
            return None
        for model in page:
            if model.source_run_id == run_id:
                return f"models:/{model.model_id}"
        if not (token := page.token):
            return None


def is_fixed(uri: str) -> bool:
    """Return True if a string is the URI of a version of a registered model, or of a model of a run by its id."""
    registered = _REGISTERED.fullmatch(uri)
    return _LOGGED.fullmatch(uri) is not None or (registered is not None and registered["version"] is not None)


@contextmanager
def _answers(option: str, uri: str, store: str) -> Iterator[None]:
    """Use a store; raise its errors as errors of an option."""
    import_mlflow()
    from mlflow.exceptions import MlflowException

    use_store(store)
    try:
        yield
    except (MlflowException, OSError) as error:
        raise ConfigError(f"{option}={uri}: MLflow at {store} does not give it ({error})") from None


def _download(option: str, uri: str, folder: Path) -> None:
    """Download a model; the folder gets its name when the download is complete. Other runs can do the same.

    Raises:
        ConfigError: the download has no model configuration.
    """
    import mlflow

    folder.parent.mkdir(parents=True, exist_ok=True)
    with owned_in_context(f".{folder.name}.", folder.parent) as partial:
        # The temporary folder itself can be read by its user only.
        target = partial / "model"
        target.mkdir()
        with long_requests():
            downloaded = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(target)))
        # MLflow's transformers flavour has the model in a subfolder.
        candidates = (downloaded / "model", downloaded)
        model = next((candidate for candidate in candidates if (candidate / "config.json").is_file()), None)
        if model is None:
            raise ConfigError(
                f"{option}: there is no config.json in {uri}, so it is neither a model of MLflow's transformers "
                "flavour nor a Hugging Face folder"
            )
        try:
            model.replace(folder)
        except OSError:
            # Another run has finished the same download first.
            if not folder.is_dir():
                raise
