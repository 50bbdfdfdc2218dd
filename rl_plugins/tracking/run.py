"""The MLflow run of a run's folder: created once, and continued by every later process with the same folder.

Every function of this module can be called again: the sender repeats an interrupted call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rl_plugins.errors import ConfigError, StorageError, UserError
from rl_plugins.run_folder import RunFolder
from rl_plugins.text_file import read_text
from rl_plugins.tracking.provenance import describe_file
from rl_plugins.tracking.store import DELETED, find_experiment, import_mlflow, open_client, use_store
from rl_plugins.tracking.unsent_metrics import Point, name_in_mlflow
from rl_plugins.whole_file import write_whole_text

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# MLflow limits the length of the tag with the list of tables.
_MAX_SHOWN_TABLES = 64
# MLflow's limits of a parameter's value and of a batch of parameters.
_MAX_VALUE, _MAX_PARAMS = 6000, 100


@dataclass(frozen=True)
class RunDescription:
    """Description of a run, recorded when the run starts.

    Attributes:
        params: MLflow parameters. Long values are cut, because the whole configuration is an artifact.
        tags: MLflow tags.
        files: files to upload as artifacts; missing files are left out.
        data: data files by their purpose (`training`, `validation`); MLflow gets a digest of each file.
        parent_run: id of the parent run; None for a run without one.
    """

    params: Mapping[str, object] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[Path] = ()
    data: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    parent_run: str | None = None


@dataclass(frozen=True)
class TrackedRun:
    """A run in an MLflow store."""

    client: MlflowClient
    run_id: str
    experiment_id: str

    def last_steps(self) -> dict[str, int]:
        """Return the highest recorded step of each metric."""
        return {metric.key: metric.step for metric in self.client.get_run(self.run_id).data._metric_objs}

    def log_points(self, points: Sequence[Point]) -> None:
        """Record values of metrics with their original times."""
        from mlflow.entities import Metric

        metrics = [Metric(point.name, point.value, point.time_ms, point.step) for point in points]
        self.client.log_batch(self.run_id, metrics=metrics)

    def log_table(self, columns: Mapping[str, Sequence[object]], file: str) -> None:
        """Record a table as an artifact for MLflow's pages. A table of the same name is replaced.

        MLflow's `log_table` appends the rows to the existing table, and takes ten times as long.
        """
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self.client.log_dict(self.run_id, {"columns": list(columns), "data": rows}, file)
        tag = self.client.get_run(self.run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]")
        previous = [entry for entry in json.loads(tag) if entry["path"] != file]
        # All tables are artifacts. The pages show the newest ones.
        tables = [*previous, {"path": file, "type": "table"}][-_MAX_SHOWN_TABLES:]
        self.client.set_tag(self.run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(tables))


def open_run(uri: str, experiment: str, folder: RunFolder, description: RunDescription) -> TrackedRun:
    """Create the MLflow run, or continue the run whose id is in the folder, and record parameters and tags.

    Args:
        uri: address of the MLflow store.
        experiment: name of the experiment; a missing experiment is created.
        folder: folder of the run; its name is the name of a new MLflow run.
        description: description to record.

    Raises:
        ConfigError: the file with the id is damaged, the store has no run of this id, or the run or its experiment is
            deleted.
        StorageError: the id of a new run cannot be written into the folder.
    """
    use_store(uri)
    client = open_client(uri)
    id_file = folder.tracking_run
    if id_file.is_file():
        run = _existing_run(client, id_file)
        if run.info.status != "RUNNING":
            client.update_run(run.info.run_id, "RUNNING")
    else:
        from mlflow.tracking.context.registry import resolve_tags

        tags = {} if description.parent_run is None else {"mlflow.parentRunId": description.parent_run}
        experiment_id = find_experiment(client, uri, experiment)
        run = client.create_run(experiment_id, run_name=folder.path.name, tags=resolve_tags(tags))
        try:
            write_whole_text(id_file, run.info.run_id)
        except StorageError:
            # Without the id, the next try would begin another run.
            client.delete_run(run.info.run_id)
            raise
    _log_params(client, run, description)
    return TrackedRun(client, run.info.run_id, run.info.experiment_id)


def is_running(uri: str, folder: RunFolder) -> bool:
    """Return True if the MLflow run of a folder has not ended; False also if the store does not answer."""
    import_mlflow()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return bool(_existing_run(open_client(uri), folder.tracking_run).info.status == "RUNNING")
    except (MlflowException, SQLAlchemyError, OSError, UserError):
        return False


def _existing_run(client: MlflowClient, id_file: Path) -> Run:
    from mlflow.exceptions import MlflowException

    run_id = read_text(id_file, "remove the file, and a new run begins").strip()
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise ConfigError(f"there is no run {run_id}: remove {id_file}, and a new one begins") from None
    if run.info.lifecycle_stage == DELETED:
        raise ConfigError(
            f"the run {run_id} or its experiment is deleted: restore it, or remove {id_file}, and a new one begins"
        )
    return run


def _log_params(client: MlflowClient, run: Run, description: RunDescription) -> None:
    from mlflow.entities import Param, RunTag

    run_id = run.info.run_id
    # MLflow does not change a parameter. New options of a resumed run are in the configuration artifact.
    named = {name_in_mlflow(key): str(value)[:_MAX_VALUE] for key, value in description.params.items()}
    params = [Param(key, value) for key, value in named.items() if key not in run.data.params]
    tags = [RunTag(key, value) for key, value in description.tags.items()]
    for start in range(0, len(params), _MAX_PARAMS):
        client.log_batch(run_id, params=params[start : start + _MAX_PARAMS])
    if tags:
        client.log_batch(run_id, tags=tags)


def record_files(tracked: TrackedRun, description: RunDescription) -> None:
    """Record the files of a description as artifacts, and the digests of its data files."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    client, run_id = tracked.client, tracked.run_id
    run = client.get_run(run_id)
    logged = {(item.dataset.name, item.dataset.digest) for item in run.inputs.dataset_inputs} if run.inputs else set()
    inputs = []
    for purpose, files in description.data.items():
        for data_file in map(describe_file, filter(Path.is_file, files)):
            if (data_file.name, data_file.digest) not in logged:
                dataset = Dataset(
                    data_file.name, data_file.digest, "local", data_file.source, schema=None, profile=data_file.profile
                )
                inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", purpose)]))
    if inputs:
        client.log_inputs(run_id, inputs)
    # Last: a store of artifacts may refuse files, and the digests are not artifacts.
    for file in description.files:
        if file.is_file():
            client.log_artifact(run_id, str(file))
