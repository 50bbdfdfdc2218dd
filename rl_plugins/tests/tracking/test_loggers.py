"""Runs in an SQLite store: the store has all facts and points, also after an outage."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from rl_plugins.launch.mlflow_run import failed_on_error
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.patience import wait_until
from rl_plugins.tracking import run as run_module
from rl_plugins.tracking import sender as sender_module
from rl_plugins.tracking.loggers import JsonLinesLogger, MLflowTracking
from rl_plugins.tracking.run import RunDescription, TrackedRun
from rl_plugins.tracking.sender import end_left_run

pytestmark = pytest.mark.usefixtures("quick_sender")


class Trained:
    """A run's two loggers."""

    def __init__(self, folder: RunFolder, tracking: MLflowTracking) -> None:
        self.loggers = [JsonLinesLogger(folder.metrics), tracking]
        self.tracking = tracking

    def steps(self, first: int, last: int, scale: float = 1.0) -> None:
        for step in range(first, last + 1):
            for logger in self.loggers:
                logger.log_metrics({"loss": scale * step, "reward": 1.0}, step)


def run_of(store: str, folder: RunFolder) -> Run:
    return MlflowClient(store).get_run(folder.tracking_run.read_text())


def history(store: str, folder: RunFolder) -> list[tuple[int, float]]:
    points = MlflowClient(store).get_metric_history(folder.tracking_run.read_text(), "loss")
    return [(point.step, point.value) for point in points]


def test_tracking_records_params_tags_files_and_data_of_a_run(store, folder, tracking, tmp_path):
    (tmp_path / "data").mkdir()
    data = tmp_path / "data" / "train.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), data)
    folder.config.write_text("stage: sft\n")
    description = RunDescription(
        params={"lr": 0.1},
        tags={"run_folder": str(folder.path)},
        files=[folder.config, folder.git_diff],
        data={"training": [data]},
        parent_run="parent",
    )
    trained = Trained(folder, tracking(description))
    trained.steps(1, 3)
    trained.tracking.finalize("success")
    run = run_of(store, folder)
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params == {"lr": "0.1"} and run.data.tags["mlflow.parentRunId"] == "parent"
    assert run.inputs is not None
    (used,) = run.inputs.dataset_inputs
    assert used.dataset.name == "data/train.parquet" and len(used.dataset.digest) == 32
    assert json.loads(str(used.dataset.profile))["rows"] == 2
    assert {tag.key: tag.value for tag in used.tags} == {"mlflow.data.context": "training"}
    assert [file.path for file in MlflowClient(store).list_artifacts(run.info.run_id)] == ["config.yaml"]


def test_tracking_records_long_and_many_params_with_strange_names(store, folder, tracking):
    many = {f"group.option_{number}": number for number in range(130)}
    description = RunDescription(params={**many, "reward.functions.{a}+b": "x" * 7000})
    trained = Trained(folder, tracking(description))
    trained.steps(1, 1)
    trained.tracking.finalize("success")
    run = run_of(store, folder)
    assert len(run.data.params) == 131 and run.data.params["reward.functions._a_b"] == "x" * 6000
    experiment = MlflowClient(store).get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_tracking_of_a_resumed_run_has_no_gap_and_no_repeated_point(store, folder, tracking):
    first = Trained(folder, tracking(RunDescription(params={"lr": 0.1})))
    first.steps(1, 3)
    first.tracking.finalize("failed")
    # The killed process has written these steps without sending; later steps are repeated with other values.
    for step in (4, 5):
        JsonLinesLogger(folder.metrics).log_metrics({"loss": float(step)}, step)
    second = Trained(folder, tracking(RunDescription(params={"lr": 0.2})))
    second.steps(3, 7, scale=10.0)
    second.tracking.finalize("success")
    assert history(store, folder) == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60), (7, 70)]
    assert second.tracking.all_sent()
    assert run_of(store, folder).info.status == "FINISHED" and run_of(store, folder).data.params == {"lr": "0.1"}


def test_end_left_run_ends_the_run_of_a_killed_process_with_the_last_metrics(store, folder, tracking):
    end_left_run(store, "tests", folder, "FAILED")
    assert not folder.tracking_run.exists()
    trained = Trained(folder, tracking(RunDescription()))
    trained.steps(1, 2)
    wait_until(lambda: folder.tracking_run.is_file() and len(history(store, folder)) == 2, "the first metrics")
    JsonLinesLogger(folder.metrics).log_metrics({"loss": 3.0}, 3)
    assert run_of(store, folder).info.status == "RUNNING"
    end_left_run(store, "tests", folder, "KILLED")
    assert run_of(store, folder).info.status == "KILLED" and history(store, folder) == [(1, 1), (2, 2), (3, 3)]
    end_left_run(store, "tests", folder, "FAILED")
    assert run_of(store, folder).info.status == "KILLED"
    trained.tracking.sender._queue.put(None)


def test_sender_sends_no_point_twice_after_a_call_that_seemed_to_fail(store, folder, tracking, monkeypatch):
    log_points = TrackedRun.log_points

    def slow(run, points):
        log_points(run, points)
        monkeypatch.setattr(TrackedRun, "log_points", log_points)
        raise OSError("timed out")

    monkeypatch.setattr(TrackedRun, "log_points", slow)
    trained = Trained(folder, tracking())
    trained.steps(1, 5)
    sender = trained.tracking.sender
    wait_until(lambda: sender.failures == 1 and not sender._unsent_metrics.has_points(), "all points after one failure")
    trained.tracking.finalize("success")
    assert history(store, folder) == [(step, step) for step in range(1, 6)]


def test_sender_reports_an_outage_and_a_later_logger_sends_the_metrics(store, folder, tracking, monkeypatch, caplog):
    def away(*_):
        raise MlflowException("no connection")

    trained = Trained(folder, tracking())
    with monkeypatch.context() as outage:
        outage.setattr(sender_module, "open_run", away)
        trained.steps(1, 4)
        trained.tracking.finalize("success")
    assert not trained.tracking.all_sent()
    away_line, lost_line = (record.getMessage() for record in caplog.records if "MLflow at" in record.getMessage())
    assert "is away, metrics wait for it: no connection" in away_line
    assert "did not take the last 3 calls" in lost_line and f"rl-plugins sync {folder.path}" in lost_line
    later = tracking()
    later.log_metrics({})
    later.finalize("success")
    assert later.all_sent() and history(store, folder) == [(step, step) for step in range(1, 5)]


def test_sender_logs_no_password(folder, monkeypatch, caplog):
    uri = "http://me:word@localhost:1"

    def open_run(*_: object) -> TrackedRun:
        raise MlflowException(f"API request to {uri}/api/2.0/mlflow failed")

    monkeypatch.setattr(sender_module, "open_run", open_run)
    tracking = MLflowTracking(uri=uri, experiment="e", folder=folder)
    tracking.log_metrics({}, 1)
    tracking.finalize("failed")
    assert "API request to http://localhost:1/api" in caplog.text and "MLflow at http://localhost:1" in caplog.text
    assert "word@" not in caplog.text


def test_sender_goes_on_after_a_refused_call(store, folder, tracking, caplog):
    trained = Trained(folder, tracking())
    trained.tracking.submit(lambda run: run.client.log_param(run.run_id, "a", 1))
    trained.tracking.submit(lambda run: run.client.log_param(run.run_id, "a", 2))
    trained.tracking.log_artifact(folder.path / "no such file")
    trained.steps(1, 1)
    trained.tracking.finalize("success")
    assert history(store, folder) == [(1, 1)] and trained.tracking.sender.failures == 0
    assert sum("could not be recorded" in record.getMessage() for record in caplog.records) == 2


def test_sender_goes_on_after_an_error_of_another_library(store, folder, tracking, caplog):
    def fail(run: TrackedRun) -> None:
        int("no number")

    trained = Trained(folder, tracking())
    trained.tracking.submit(fail)
    trained.steps(1, 1)
    trained.tracking.finalize("success")
    assert history(store, folder) == [(1, 1)] and not trained.tracking.all_sent()
    assert any("could not be recorded: invalid literal" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("error", "is_foreign"),
    [
        (PermissionError(13, "Permission denied: '/mlruns'"), False),
        # As an error of botocore.
        (RuntimeError("An error occurred (AccessDenied) when calling the PutObject operation"), True),
    ],
)
def test_sender_sends_metrics_if_the_store_refuses_files(
    error, is_foreign, store, folder, tracking, monkeypatch, caplog
):
    def refuse(*_):
        raise error

    monkeypatch.setattr(MlflowClient, "log_artifact", refuse)
    folder.config.write_text("stage: sft\n")
    description = RunDescription(params={"lr": 0.1}, files=[folder.config], data={"training": [folder.config]})
    trained = Trained(folder, tracking(description))
    trained.steps(1, 2)
    trained.tracking.finalize("success")
    run = run_of(store, folder)
    assert history(store, folder) == [(1, 1), (2, 2)] and trained.tracking.sender.failures == 0
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1"}
    assert run.inputs is not None and len(run.inputs.dataset_inputs) == 1
    assert trained.tracking.all_sent() != is_foreign
    assert f"something could not be recorded: {error}" in caplog.text


def test_sender_sends_metrics_beside_a_server_without_a_store_of_artifacts(store, folder, tracking, monkeypatch):
    def fail(*_):
        raise MlflowException("the bucket refuses the file")  # status 500

    monkeypatch.setattr(MlflowClient, "log_artifact", fail)
    monkeypatch.setattr(sender_module, "_RETRY_S", 0.0)
    folder.config.write_text("stage: sft\n")
    trained = Trained(folder, tracking(RunDescription(files=[folder.config])))
    trained.steps(1, 2)
    wait_until(lambda: folder.tracking_run.is_file() and len(history(store, folder)) == 2, "the metrics")
    trained.tracking.finalize("success")
    assert run_of(store, folder).info.status == "FINISHED" and not trained.tracking.all_sent()


def test_sender_names_a_deleted_experiment_and_waits_for_the_restore(store, folder, experiment, tracking, caplog):
    client = MlflowClient(store)
    experiment_id = client.create_experiment(experiment)
    client.delete_experiment(experiment_id)
    trained = Trained(folder, tracking())
    trained.steps(1, 2)
    wait_until(lambda: trained.tracking.sender.failures > 1, "a second try")
    (message,) = (record.getMessage() for record in caplog.records if record.name == sender_module.__name__)
    assert "does not take the run" in message and f"{experiment!r} is deleted: restore it" in message
    assert f"--experiment-id {experiment_id}" in message and "tracking.experiment" in message
    client.restore_experiment(experiment_id)
    # At the end nothing is tried again.
    wait_until(folder.tracking_run.is_file, "the run in the restored experiment")
    trained.tracking.finalize("success")
    assert trained.tracking.all_sent() and history(store, folder) == [(1, 1), (2, 2)]


def test_open_run_refuses_a_deleted_or_unknown_run_and_names_the_file(store, folder, tracking, caplog):
    def refused() -> str:
        caplog.clear()
        logger = tracking()
        logger.log_metrics({})
        logger.finalize("success")
        assert not logger.all_sent()
        return next(record.getMessage() for record in caplog.records if record.name == sender_module.__name__)

    trained = Trained(folder, tracking())
    trained.steps(1, 2)
    trained.tracking.finalize("success")
    JsonLinesLogger(folder.metrics).log_metrics({"loss": 3.0}, 3)
    MlflowClient(store).delete_run(folder.tracking_run.read_text())
    assert f"is deleted: restore it, or remove {folder.tracking_run}" in refused()
    folder.tracking_run.write_text("0" * 32)
    assert f"there is no run {'0' * 32}: remove {folder.tracking_run}" in refused()
    folder.tracking_run.unlink()
    later = tracking()
    later.log_metrics({})
    later.finalize("success")
    assert later.all_sent() and history(store, folder) == [(1, 1), (2, 2), (3, 3)]


def test_log_table_replaces_a_table_of_the_same_name(store, folder, tracking, tmp_path):
    logger = tracking()
    for answer in ("first", "second"):
        logger.log_table({"prompt": ["a"], "response": [answer]}, "samples/step_1.json")
    logger.finalize("success")
    run_id = folder.tracking_run.read_text()
    path = MlflowClient(store).download_artifacts(run_id, "samples/step_1.json", str(tmp_path))
    assert json.loads(Path(path).read_text()) == {"columns": ["prompt", "response"], "data": [["a", "second"]]}
    assert "samples/step_1.json" in run_of(store, folder).data.tags["mlflow.loggedArtifacts"]


def test_log_table_shows_the_newest_tables(run, monkeypatch):
    monkeypatch.setattr(run_module, "_MAX_SHOWN_TABLES", 2)
    for step in (1, 2, 3, 2):
        run.log_table({"prompt": ["a"]}, f"samples/step_{step}.json")
    tag = json.loads(run.client.get_run(run.run_id).data.tags["mlflow.loggedArtifacts"])
    assert tag == [{"path": f"samples/step_{step}.json", "type": "table"} for step in (3, 2)]
    assert len(run.client.list_artifacts(run.run_id, "samples")) == 3


@pytest.mark.parametrize("named", [None, "http://elsewhere:5000"])
def test_tracking_leaves_mlflow_tracking_uri_unchanged(named, store, folder, tracking, monkeypatch):
    if named is None:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", named)
    trained = Trained(folder, tracking())
    trained.steps(1, 1)
    trained.tracking.finalize("success")
    assert trained.tracking.all_sent() and os.environ.get("MLFLOW_TRACKING_URI") == named


def test_sender_leaves_no_run_in_the_store_without_mlflow_run_id(store, folder, experiment, tracking, caplog):
    folder.tracking_run.mkdir()
    trained = Trained(folder, tracking())
    trained.steps(1, 1)
    trained.tracking.finalize("success")
    assert "mlflow_run_id cannot be written" in caplog.text
    client = MlflowClient(store)
    (found,) = client.search_experiments(filter_string=f"name = '{experiment}'")
    assert client.search_runs([found.experiment_id]) == []


def test_sender_leaves_out_calls_beyond_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender_module, "_LONGEST_QUEUE", 3)
    away = sender_module.RunSender("http://away", "grpo", RunFolder(tmp_path), RunDescription())
    # A thread that takes no call.
    away._thread = threading.Thread()
    for _ in range(5):
        away.offer(lambda run: None)
    away.send_metrics()
    assert away._queue.qsize() == 4
    assert [record.getMessage() for record in caplog.records] == [
        "3 calls wait for MLflow at http://away: further traces and tables are left out until MLflow takes calls"
    ]


def test_status_of_a_run_follows_a_stop_and_an_error_after_the_fit(store, folder, tracking):
    trained = Trained(folder, tracking())
    trained.steps(1, 1)
    trained.tracking.finalize("success")
    assert run_of(store, folder).info.status == "FINISHED"
    with pytest.raises(InterruptedError), failed_on_error(trained.loggers):
        raise InterruptedError
    assert run_of(store, folder).info.status == "FAILED"
    folder.stopped.write_text("after step 2: SIGTERM")
    trained.steps(2, 2)
    trained.tracking.finalize("success")
    assert run_of(store, folder).info.status == "KILLED"
