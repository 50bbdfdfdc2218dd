"""MLflow for a recipe's run: `rl-plugins sync` after an outage at the end of the run, and the description of a run."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from omegaconf import OmegaConf

from rl_plugins.config.recipe import RecipeConfig, read_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch import mlflow_run
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.mlflow_run import describe_run, registration, sync
from rl_plugins.launch.resume import note_end
from rl_plugins.manifest import MANIFEST
from rl_plugins.run_folder import RunFolder, append_metrics
from rl_plugins.tests.files import rewrite_manifest
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.tests.patience import patient
from rl_plugins.tracking.registry import Evaluation
from rl_plugins.tracking.run import TrackedRun

PROMPT = "17+25="
DEADLINE_S = patient(60)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory, sqlite_without_sync: None) -> Path:
    """The file of an MLflow store, for copies: MLflow takes a second to make a store."""
    file = tmp_path_factory.mktemp("store") / "empty.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture(scope="module")
def store(empty_store: Path) -> str:
    return f"sqlite:///{shutil.copy(empty_store, empty_store.with_name('mlflow.db'))}"


@pytest.fixture
def folder(store: str, tmp_path: Path) -> RunFolder:
    """The folder of an ended run whose content was never sent."""
    folder = RunFolder(tmp_path / "run")
    for path in (folder.checkpoint(1), folder.checkpoint(2), folder.samples, folder.export):
        path.mkdir(parents=True)
        (path / "state").touch()
    for step in (1, 2):
        rewrite_manifest(folder.checkpoint(step))
        append_metrics(folder.metrics, {"train/loss": 1.0 / step, "val/reward": 0.5}, step)
    row = {"prompt": PROMPT, "response": "42", "score": 1.0, "ground_truth": "42", "failure": None}
    (folder.samples / "step_00000002.json").write_text(json.dumps([row]))
    overrides = [
        "model.path=tiny", f"run.output_dir={tmp_path}", "run.name=run", "run.steps=2", f"tracking.uri={store}",
        f"tracking.experiment={tmp_path.name}", "tracking.register_as=adder",
    ]  # fmt: skip
    folder.config.write_text(OmegaConf.to_yaml(compose_config("grpo", overrides)))
    note_end(read_config(folder.config), folder, 2)
    return folder


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the examples of registered policies, without MLflow's transformers flavour, which is slow.

    As in `register_policy`, a policy that a run has registered gets no second version.
    """
    examples: list[str] = []

    def register_policy(run: TrackedRun, policy: Path, name: str, evaluation: Evaluation, example: str) -> str:
        known = f"{example} {evaluation.value}"
        if known not in examples:
            examples.append(known)
            if not run.client.search_registered_models(f"name='{name}'"):
                run.client.create_registered_model(name)
            run.client.create_model_version(name, policy.as_uri(), run.run_id)
        return "registered"

    monkeypatch.setattr(mlflow_run, "register_policy", register_policy)
    return examples


def test_sync_sends_all_of_a_run_and_registers_each_policy_once(
    store: str, folder: RunFolder, registered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert sync(folder.path, None, DEADLINE_S)
        assert f"{store} has all of {folder.path}, 2 steps" in capsys.readouterr().out
    client, run_id = MlflowClient(store), folder.tracking_run.read_text()
    sent = {file.path for name in (None, "checkpoints", "samples") for file in client.list_artifacts(run_id, name)}
    assert {"report.html", "curves.png", "config.yaml"} <= sent
    assert {"checkpoints/step_00000001.json", "checkpoints/step_00000002.json", "samples/step_00000002.json"} <= sent
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.tags["checkpoint.step"] == "2"
    assert len(client.get_metric_history(run_id, "train/loss")) == 2
    assert registered == [f"{PROMPT} 0.5"]
    # A continued run has another policy when it is finished again.
    config = OmegaConf.load(folder.config)
    config.run.steps = 9
    folder.config.write_text(OmegaConf.to_yaml(config))
    folder.finished.unlink()
    append_metrics(folder.metrics, {"val/reward": 0.75}, 9)
    assert sync(folder.path, None, DEADLINE_S)
    assert "the run is not finished, so sync registers no policy" in capsys.readouterr().out
    assert registered == [f"{PROMPT} 0.5"]
    note_end(read_config(folder.config), folder, 9)
    assert sync(folder.path, None, DEADLINE_S)
    assert registered == [f"{PROMPT} 0.5", f"{PROMPT} 0.75"]


def test_registration_takes_no_value_of_another_step(folder: RunFolder, registered: list[str]) -> None:
    append_metrics(folder.metrics, {"train/loss": 0.3}, 3)
    note_end(read_config(folder.config), folder, 3)
    append_metrics(folder.metrics, {"val/reward": 0.75}, 4)
    assert sync(folder.path, None, DEADLINE_S)
    assert registered == [f"{PROMPT} None"]


def test_identifier_of_the_validation_data_differs_with_the_number_of_rows(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data: list[str] = []
    monkeypatch.setattr(mlflow_run, "register_policy", lambda *arguments: data.append(arguments[3].data))
    config, rows, run = read_config(folder.config), tmp_path / "test.parquet", cast(TrackedRun, None)
    pq.write_table(pa.table({"row": range(60)}), rows)
    config.data.val_files = [str(rows)]
    for config.data.max_val_rows in (None, 5, 50, 5, 60):
        registration(config, folder, 2)(run)
    whole, few, more, again, all_rows = data
    assert few == again and whole == all_rows and len({whole, few, more}) == 3


def test_sync_gives_the_status_of_the_end_of_training(store: str, folder: RunFolder) -> None:
    config = OmegaConf.load(folder.config)
    config.run.steps = 9
    folder.config.write_text(OmegaConf.to_yaml(config))
    folder.finished.unlink()
    for status in ("KILLED", "FINISHED"):
        assert sync(folder.path, None, DEADLINE_S)
        assert MlflowClient(store).get_run(folder.tracking_run.read_text()).info.status == status
        folder.finished.write_text("{}")


def test_sync_gives_the_status_of_a_run_without_an_export(store: str, folder: RunFolder) -> None:
    shutil.rmtree(folder.export)
    folder.finished.unlink()
    folder.error.write_text("no room for the export")
    for status in ("FAILED", "KILLED"):
        assert sync(folder.path, None, DEADLINE_S)
        assert MlflowClient(store).get_run(folder.tracking_run.read_text()).info.status == status
        folder.error.unlink(missing_ok=True)


def test_sync_is_not_complete_if_the_policy_could_not_be_registered(
    folder: RunFolder, registered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = OmegaConf.load(folder.config)
    config.data.val_files = ["/gone/test.parquet"]
    folder.config.write_text(OmegaConf.to_yaml(config))
    assert not sync(folder.path, None, DEADLINE_S)
    assert "has all of" not in capsys.readouterr().out and registered == []


def test_sync_names_a_damaged_file_and_the_way_out(folder: RunFolder) -> None:
    config = folder.config.read_text()
    for file, content, way_out in (
        (folder.config, b"run: [1", "replace the file with an intact copy"),
        (folder.config, b"run: {stepz: 1}", "did you mean 'run.steps'"),
        (folder.git_state, b'{"commit": 1}', "mend or remove the file"),
        (folder.installed_packages, b"\xff", "mend or remove the file"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"^{re.escape(str(file))}: .*{re.escape(way_out)}"):
            sync(folder.path, None, DEADLINE_S)
        file.unlink()
        folder.config.write_text(config)


def test_sync_sends_the_rest_of_a_folder_with_damaged_samples_and_manifests(
    store: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.checkpoint(1) / MANIFEST).write_text("{}")
    (folder.samples / "step_00000001.json").write_bytes(b"\xff")
    assert sync(folder.path, None, DEADLINE_S)
    assert f"{folder.samples / 'step_00000001.json'} is damaged, and left out of MLflow" in capsys.readouterr().out
    client, run_id = MlflowClient(store), folder.tracking_run.read_text()
    sent = {file.path for name in ("checkpoints", "samples") for file in client.list_artifacts(run_id, name)}
    assert sent == {"checkpoints/step_00000002.json", "samples/step_00000002.json"}


def test_sync_is_complete_again_after_steps_that_a_roll_back_repeats(folder: RunFolder) -> None:
    append_metrics(folder.metrics, {"guard/rollbacks": 1.0}, 1)
    append_metrics(folder.metrics, {"train/loss": 0.25}, 2)
    assert sync(folder.path, None, DEADLINE_S)
    assert sync(folder.path, None, DEADLINE_S)


def test_sync_to_another_store_makes_a_new_run(empty_store: Path, folder: RunFolder, tmp_path: Path) -> None:
    assert sync(folder.path, None, DEADLINE_S)
    first, other = folder.tracking_run.read_text(), f"sqlite:///{shutil.copy(empty_store, tmp_path / 'other.db')}"
    assert sync(folder.path, other, DEADLINE_S)
    assert folder.tracking_run.read_text() != first
    assert OmegaConf.load(folder.config).tracking.uri == other
    assert MlflowClient(other).get_run(folder.tracking_run.read_text()).data.metrics["train/loss"] == 0.5


def test_sync_takes_a_password_for_the_store_of_the_run(
    folder: RunFolder, refused_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = folder.config.read_text()
    config = OmegaConf.create(text)
    config.tracking.uri = f"http://{refused_address}"
    folder.config.write_text(OmegaConf.to_yaml(config))
    folder.tracking_run.write_text("the run")
    used: list[str | None] = []

    def tracking_logger(config: RecipeConfig, _: RunFolder) -> None:
        used.append(config.tracking.uri)
        raise ZeroDivisionError

    monkeypatch.setattr(mlflow_run, "check_store", used.append)
    monkeypatch.setattr(mlflow_run, "tracking_logger", tracking_logger)
    with_password = f"http://me:word@{refused_address}"
    with pytest.raises(ZeroDivisionError):
        sync(folder.path, with_password, DEADLINE_S)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", with_password)
    with pytest.raises(ZeroDivisionError):
        sync(folder.path, None, DEADLINE_S)
    assert used == [with_password] * 4 and folder.tracking_run.read_text() == "the run"


@pytest.fixture
def no_mlflow() -> Iterator[str]:
    """The address of a server of another kind."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    # Interval of the server's checks for its end.
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_sync_to_a_wrong_address_changes_nothing_in_the_folder(
    folder: RunFolder, no_mlflow: str, refused_address: str
) -> None:
    folder.tracking_run.write_text("the run")
    config = folder.config.read_text()
    for uri, message in {
        f"http://{refused_address}": "no server answers there",
        "sqlite:////gone/a.db": "the folder /gone does not exist",
        "elsewhere://a": "MLflow store elsewhere://a: MLflow opens no such store",
        no_mlflow: f"--uri {no_mlflow}: no MLflow store answers there",
    }.items():
        with pytest.raises(ConfigError, match=message):
            sync(folder.path, uri, DEADLINE_S)
    assert folder.config.read_text() == config and folder.tracking_run.read_text() == "the run"


@pytest.mark.parametrize(
    ("recipe", "options", "expected"),
    [
        ("grpo", ["algorithm=rloo"], ("rloo", "ppo_clip", 2)),
        ("grpo", ["algorithm=gspo", "launcher=local"], ("grpo", "gspo", 1)),
        ("preference_optimization", [], (None, "dpo", 2)),
    ],
)
def test_describe_run_names_algorithm_loss_and_workers(recipe, options, expected, tmp_path):
    config = configured(recipe, "model.path=model", "placement.num_workers=2", *options)
    params = describe_run(config, RunFolder(tmp_path)).params
    loss = params.get("algorithm.policy_loss", params.get("loss.name"))
    assert (params.get("algorithm.advantage"), loss, params["workers"]) == expected


def test_describe_run_has_changed_options_the_command_and_no_defaults(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.installed_packages.write_text("# python 3.11\n# train.py run.steps=7\ntorch==2\n")
    changed = ["schedule.max_staleness=1", "algorithm.kl.coefficient=0.1", "reward=gsm8k"]
    described = describe_run(configured("grpo", "model.path=model", *changed), folder)
    assert described.params["schedule.max_staleness"] == 1 and described.params["algorithm.kl.coefficient"] == 0.1
    assert described.params["algorithm.advantage_options.scale"] == "group"
    assert described.params["reward.functions.default._target_"] == "rl_plugins.rewards.scorers.final_answer"
    # Options with their defaults, except for options that compare runs.
    assert not {"schedule.ahead", "algorithm.kl.estimator", "guard.action"} & described.params.keys()
    assert described.params["run.seed"] == 0
    assert described.tags["mlflow.source.name"] == "train.py run.steps=7"
