"""An MLflow run: created once, continued by whoever has the run's folder, and told what the run is made of.

Everything here may be done again: a call that was cut off by an outage is made a second time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.callbacks.data_digest import describe_file
from rl_plugins.callbacks.metrics_tail import Point
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


_SHOWN_TABLES = 64
_DELETED = "deleted"
_STORE_VARIABLE = "MLFLOW_TRACKING_URI"


@dataclass(frozen=True)
class Facts:
    """What is said of a run when it begins.

    Attributes:
        params: few, and short: the whole configuration is a file.
        tags: name to text.
        files: artifacts.
        data: what a file is for (`training`, `validation`) to the files; they are logged with the digest of their
            content.
        parent_run: id of the run that this one belongs to.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Path] = ()
    data: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    parent_run: str | None = None


@dataclass(frozen=True)
class TrackedRun:
    """A run in a store that answers."""

    client: MlflowClient
    run_id: str
    experiment_id: str

    def last_steps(self) -> dict[str, int]:
        """The highest step that the store has of each metric."""
        return {metric.key: metric.step for metric in self.client.get_run(self.run_id).data._metric_objs}

    def log_points(self, points: Sequence[Point]) -> None:
        """Values of metrics, each with the time at which it was measured."""
        from mlflow.entities import Metric

        metrics = [Metric(point.name, point.value, point.time_ms, point.step) for point in points]
        self.client.log_batch(self.run_id, metrics=metrics)

    def log_table(self, data: Mapping[str, list[Any]], file: str) -> None:
        """A table that MLflow's pages show; one of the same name is replaced.

        MLflow's own `log_table` adds the rows to those that are there, and takes ten times as long.
        """
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        rows = [list(row) for row in zip(*data.values(), strict=True)]
        self.client.log_dict(self.run_id, {"columns": list(data), "data": rows}, file)
        tag = self.client.get_run(self.run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]")
        others = [entry for entry in json.loads(tag) if entry["path"] != file]
        # A tag is of limited length: of more tables the pages show the newest, and all are among the artifacts.
        tables = [*others, {"path": file, "type": "table"}][-_SHOWN_TABLES:]
        self.client.set_tag(self.run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(tables))


def use_store(uri: str) -> None:
    """Name the store to what of MLflow asks no client: tables, traces, downloads.

    MLflow itself would leave the name in the environment, and with it to every later run of this process and its
    children, whatever store those have.
    """
    import mlflow

    before = os.environ.get(_STORE_VARIABLE)
    mlflow.set_tracking_uri(uri)
    if before is None:
        os.environ.pop(_STORE_VARIABLE, None)
    else:
        os.environ[_STORE_VARIABLE] = before


def open_run(uri: str, experiment: str, folder: RunFolder, facts: Facts) -> TrackedRun:
    """Create the run, or go on with the one whose id is in the folder, and say the facts.

    Raises:
        ConfigError: the store does not know the run, or the run or its experiment is deleted there; names the way out.
    """
    import mlflow

    use_store(uri)
    client = mlflow.MlflowClient(uri)
    file = folder.tracking_run
    if file.is_file():
        run = _known_run(client, file)
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, "RUNNING")
    else:
        from mlflow.tracking.context.registry import resolve_tags

        tags = {} if facts.parent_run is None else {"mlflow.parentRunId": facts.parent_run}
        experiment_id = find_experiment(client, uri, experiment)
        run = client.create_run(experiment_id, run_name=folder.path.name, tags=resolve_tags(tags))
        file.write_text(run.info.run_id)
    _say(client, run, facts)
    return TrackedRun(client, run.info.run_id, run.info.experiment_id)


def find_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """The id of an experiment, which is created if it is not there.

    Raises:
        ConfigError: it is deleted, and MLflow gives its name to no other.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        return client.create_experiment(name, artifact_location(uri))
    if found.lifecycle_stage == _DELETED:
        raise ConfigError(
            f"the experiment {name!r} is deleted: restore it (mlflow experiments restore --experiment-id "
            f"{found.experiment_id}), or choose another one by tracking.experiment (of a pipeline: experiment)"
        )
    return found.experiment_id


def _known_run(client: MlflowClient, file: Path) -> Run:
    from mlflow.exceptions import MlflowException

    run_id = file.read_text().strip()
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise ConfigError(f"there is no run {run_id}: remove {file}, and a new one begins") from None
    if run.info.lifecycle_stage == _DELETED:
        raise ConfigError(
            f"the run {run_id} or its experiment is deleted: restore it, or remove {file}, and a new one begins"
        )
    return run


def artifact_location(uri: str) -> str | None:
    """Where a new experiment keeps its artifacts: beside an SQLite store; a server knows itself.

    MLflow's default for SQLite is the working directory, and that of a Ray worker is a temporary one.
    """
    prefix = "sqlite:///"
    if not uri.startswith(prefix):
        return None
    return (Path(uri.removeprefix(prefix)).absolute().parent / "mlartifacts").as_uri()


def _say(client: MlflowClient, run: Any, facts: Facts) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

    run_id = run.info.run_id
    # A parameter cannot be changed: what a resumed run was given in its place is in its configuration.
    params = [Param(key, str(value)) for key, value in facts.params.items() if key not in run.data.params]
    tags = [RunTag(key, value) for key, value in facts.tags.items()]
    if params or tags:
        client.log_batch(run_id, params=params, tags=tags)
    for file in facts.files:
        if file.is_file():
            client.log_artifact(run_id, str(file))
    known = {(one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs} if run.inputs else set()
    inputs = []
    for context, files in facts.data.items():
        for path in filter(Path.is_file, files):
            described = describe_file(path)
            if (described.name, described.digest) not in known:
                dataset = Dataset(
                    described.name, described.digest, "local", described.source, schema=None, profile=described.profile
                )
                inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    if inputs:
        client.log_inputs(run_id, inputs)
