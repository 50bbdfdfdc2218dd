"""Downloads of a run: data and models from the Hugging Face hub, from storage and from MLflow.

On a Ray cluster, all machines download the models of the hub before any role starts. A machine that joins later
downloads when its first process needs the model.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError, DeadlineExceeded, config_errors, user_errors_of_tasks
from rl_plugins.hub.files import adapter_folder, download, model_folder, repository_files
from rl_plugins.hub.names import HubName, model_name
from rl_plugins.launch.pinned_versions import SCHEME, PinnedVersions, pinned_model
from rl_plugins.redaction import without_password
from rl_plugins.storage import fetch_copy, is_address
from rl_plugins.tracking.registry import fetch_model, is_in_mlflow
from rl_plugins.whole_file import link_or_copy, write_whole

_DATA = re.compile(
    r"hf://datasets/(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[\w.%-]+))?/(?P<path>[^?#]+)",
    re.ASCII,
)
_MODEL_REWARD = "rl_plugins.rewards.model.ModelReward"
_SHOWN_FILES = 4
_DIGITS = 12
_SAY_EVERY_S = 10.0
# A download that stands still ends long before: this deadline is for a machine that does not answer.
_DEADLINE_S = 6 * 3600.0

# Data ----------------------------------------------------------------------------------------------------


def fetch_data(config: RecipeConfig, versions: PinnedVersions) -> None:
    """Download the data files in storage and on the hub, replace their addresses by paths, and print each path.

    Args:
        config: configuration of the run.
        versions: versions of the run.

    Raises:
        ConfigError: there is no such file, or the storage does not answer.
    """

    def fetched(option: str, path: str) -> list[str]:
        if not is_data_address(path):
            return [_copy_of(config, option, path, "data")]
        files = fetch_data_files(versions, option, path, _cache(config, "data"))
        for file in files:
            print(f"{config.run.name}: {path} is {file}", flush=True)
        return files

    config.data.replace_files(fetched)


def is_data_address(path: str) -> bool:
    """Return True for an address on the hub."""
    return path.startswith(SCHEME)


def fetch_data_files(versions: PinnedVersions, option: str, address: str, cache: Path) -> list[str]:
    """Return local copies of the files at an address on the hub, in a folder that all machines of the run see.

    Args:
        versions: versions of the run.
        option: option with the address.
        address: `hf://datasets/OWNER/NAME[@REVISION]/PATH`. The path is a file, a folder with parquet files, or a
            pattern with `*`.
        cache: parent folder of the copies.

    Raises:
        ConfigError: the address is malformed, the hub does not give the files, there is no such file, or a file is not
            parquet.
    """
    parts = _DATA.fullmatch(address)
    if parts is None:
        raise ConfigError(
            f"{option}={address}: must be hf://datasets/OWNER/NAME/PATH or hf://datasets/OWNER/NAME@REVISION/PATH; the "
            "path is a parquet file, a folder with parquet files, or a pattern such as data/train-*.parquet"
        )
    revision, path = parts["revision"], parts["path"].strip("/")
    asked = HubName(parts["repository"], revision and unquote(revision), "dataset")
    name = versions.pin(option, asked)
    patterns = [path, f"{path}/*.parquet"]
    snapshot = download(name, patterns, option, left_out=())
    there = (file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file())
    files = sorted(file for file in there if file == path or any(fnmatchcase(file, pattern) for pattern in patterns))
    if not files:
        others = [file for file in repository_files(name) if not file.startswith(".")]
        raise ConfigError(f"{option}={address}: the repository has no such file{_some(others)}: correct the path")
    for file in files:
        if not file.endswith(".parquet"):
            raise ConfigError(
                f"{option}={address}: {file} is not a parquet file: convert it with `rl-plugins prepare`, or name the "
                f"hub's own conversion, hf://datasets/{asked.repository}@refs/convert/parquet/..."
            )
    copies = cache / f"{name.repository.replace('/', '--')}-{str(name.revision)[:_DIGITS]}"
    return [str(_copied(snapshot / file, copies / file)) for file in files]


def _some(files: Sequence[str]) -> str:
    parquet = [file for file in files if file.endswith(".parquet")] or list(files)
    more = ", ..." if len(parquet) > _SHOWN_FILES else ""
    return f" (it has {', '.join(parquet[:_SHOWN_FILES])}{more})" if parquet else ""


def _copied(file: Path, copy: Path) -> Path:
    """Give a file of the cache a name in another folder. A copy of the same size is of the same commit."""
    if not (copy.is_file() and copy.stat().st_size == file.stat().st_size):
        write_whole(copy, lambda new: link_or_copy(file.resolve(), new))
    return copy


# Models ----------------------------------------------------------------------------------------------------


def fetch_models(config: RecipeConfig, versions: PinnedVersions) -> None:
    """Download the models in MLflow and in storage, replace their paths by the folders, and print each folder.

    A name on the Hugging Face hub is replaced by the name with its commit. `check_models` fetches the files.

    Args:
        config: configuration of the run.
        versions: versions of the run.

    Raises:
        ConfigError: there is no such model, the store does not answer, or the model is in another format.
    """

    def fetched(option: str, path: str) -> str:
        if is_in_mlflow(path):
            store = config.store_uri
            found = str(fetch_model(option, versions.pin_model(option, path, store), store, _cache(config, "models")))
        else:
            found = pinned_model(versions, option, path)
        if found != path:
            print(f"{config.run.name}: {path} is {found}", flush=True)
            return found
        return _copy_of(config, option, path, "models")

    config.replace_model_paths(fetched)
    for option, node in reward_models(config):
        node["path"] = pinned_model(versions, option, node["path"])
        # The trial of the reward loads the model, and has a short deadline for the load.
        model_folder(node["path"], option=option, trust_remote_code=bool(node.get("trust_remote_code")))


class _HubModel(NamedTuple):
    """A model or an adapter of the hub: option, name, and trust in the Python code of the model."""

    option: str
    path: str
    trust_remote_code: bool
    is_adapter: bool = False


def reward_models(config: RecipeConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the option and the node of each reward that is a model."""
    for source, node in config.reward.functions.items():
        if isinstance(node, dict) and node.get("_target_") == _MODEL_REWARD and isinstance(node.get("path"), str):
            yield f"reward.functions.{source}.path", node


def fetch_weights(config: RecipeConfig) -> None:
    """Download the weights of the models of the hub to this machine, and check them.

    Raises:
        ConfigError: the hub does not give a file, or the files do not fit each other.
    """
    _fetch(_hub_models(config))


def _hub_models(config: RecipeConfig) -> list[_HubModel]:
    """Return the models and the adapters of a run that have a name on the hub."""
    trusted = config.model.trust_remote_code
    models = [_HubModel(option, path, trusted) for option, path in config.model_paths.items()]
    models += [_HubModel(option, path, trusted, is_adapter=True) for option, path in config.adapter_paths.items()]
    for option, node in reward_models(config):
        models.append(_HubModel(option, node["path"], bool(node.get("trust_remote_code"))))
    return [model for model in models if model_name(model.path) is not None]


def _fetch(models: Sequence[_HubModel]) -> None:
    from rl_plugins.models.folder import check_model_folder

    for option, path, trusted, is_adapter in models:
        if is_adapter:
            adapter_folder(path, option=option)
        else:
            check_model_folder(option, path, trust_remote_code=trusted)


def fetch_on_machines(config: RecipeConfig, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Download the models of the hub on each machine that runs processes with models. Ray must be initialized.

    Args:
        config: options of the run; the models have commits.
        nodes: Ray's description of each living machine.

    Raises:
        ConfigError: the hub does not give a file to a machine.
        DeadlineExceeded: a machine did not answer, or its download stands still.
    """
    models = _hub_models(config)
    names = ", ".join(sorted({model.path for model in models}))
    kind = "GPU" if config.on_gpus else "CPU"
    places = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Resources"].get(kind, 0)}
    if not models or not places:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    waiting: dict[Any, str] = {}
    for node, address in places.items():
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        fetch: Any = ray.remote(_fetch).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        waiting[fetch.remote(models)] = address
    begun = time.monotonic()
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=_SAY_EVERY_S)
        for task in done:
            address = waiting.pop(task)
            with config_errors(f"machine {address}: "), user_errors_of_tasks():
                ray.get(task, timeout=_SAY_EVERY_S)
        waited, machines = time.monotonic() - begun, ", ".join(sorted(waiting.values()))
        if waiting and waited > _DEADLINE_S:
            raise DeadlineExceeded(f"the run waited {waited:.0f} s for {machines} to download {names}")
        if waiting and not done:
            print(f"{config.run.name}: waiting for {names} on {machines}, {waited:.0f} s", flush=True)


def _copy_of(config: RecipeConfig, option: str, path: str, kind: str) -> str:
    if not is_address(path):
        return path
    copy = fetch_copy(option, path, _cache(config, kind))
    print(f"{config.run.name}: {without_password(path)} is {copy}", flush=True)
    return str(copy)


def _cache(config: RecipeConfig, kind: str) -> Path:
    return Path(config.run.output_dir) / f".{kind}"
