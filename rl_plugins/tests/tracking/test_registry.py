"""Policies in the model registry: registration, and local folders of registered models."""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow.exceptions import MlflowException
from mlflow.store.entities import PagedList

from rl_plugins.errors import ConfigError
from rl_plugins.launch.pinned_versions import PinnedVersions
from rl_plugins.run_folder import RunFolder
from rl_plugins.tracking import registry
from rl_plugins.tracking.registry import Evaluation, compare, fetch_model, register_policy, resolve_model
from rl_plugins.tracking.run import RunDescription, open_run

GOOD = Evaluation("val/reward", 0.5, "data")


@pytest.mark.parametrize(
    ("evaluation", "champion", "wins", "reason"),
    [
        (GOOD, None, True, "the first one"),
        (GOOD, {"val/reward": "0.4", "evaluated_on": "data"}, True, "0.5 against 0.4"),
        (GOOD, {"val/reward": "0.5", "evaluated_on": "data"}, False, "0.5 against 0.5"),
        (GOOD, {"val/reward": "0.1", "evaluated_on": "other"}, False, "of other data"),
        (GOOD, {"evaluated_on": "data"}, False, "no val/reward to compare"),
        (replace(GOOD, value=None), None, False, "the run has no val/reward"),
    ],
)
def test_compare_prefers_only_a_better_policy(evaluation, champion, wins, reason):
    wins_actually, explanation = compare(evaluation, champion)
    assert wins_actually is wins and reason in explanation


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    from rl_plugins.models.tiny import save_tiny_policy

    folder = tmp_path_factory.mktemp("policies")
    for name in ("first", "second"):
        save_tiny_policy(folder / name, seed=len(name))
    return folder


def test_register_policy_and_fetch_model_of_the_champion(store, experiment, policies, tmp_path):
    import mlflow
    from mlflow.exceptions import MlflowException

    outcomes = []
    for name, value in (("first", 0.5), ("second", 0.6), ("first", 0.4)):
        folder = RunFolder(tmp_path / f"{name}{value}")
        folder.path.mkdir()
        run = open_run(store, experiment, folder, RunDescription())
        evaluation = replace(GOOD, value=value)
        for _ in range(2):  # a second call finds the version of the first call
            outcomes.append(register_policy(run, policies / name, experiment, evaluation, "17+25="))
    starts = [f"{experiment} version {version}, {what} champion" for version, what in ((1, "the"), (2, "the"))]
    assert outcomes[0].startswith(starts[0]) and outcomes[2].startswith(starts[1])
    assert outcomes[5].startswith(f"{experiment} version 3, not the champion: val/reward 0.4 against 0.6")

    named = f"models:/{experiment}@champion"
    champion = fetch_model("model.path", named, store, tmp_path / "cache")
    assert champion.parent == tmp_path / "cache" / experiment and champion.name.startswith("2-")
    weights = "model.safetensors"
    assert (champion / weights).read_bytes() == (policies / "second" / weights).read_bytes()
    assert (champion / "tokenizer.json").is_file()
    assert resolve_model("model.path", named, store) == f"models:/{experiment}/2"
    kept = (champion / weights).stat().st_mtime_ns
    assert fetch_model("model.path", f"models:/{experiment}/2", store, tmp_path / "cache") == champion
    assert (champion / weights).stat().st_mtime_ns == kept, "it was fetched again"

    pipeline = mlflow.transformers.load_model(named)
    (answer,) = pipeline("17+25=", max_new_tokens=2)
    assert answer["generated_text"].startswith("17+25=")
    model = mlflow.pyfunc.load_model(named)
    question = {"messages": [{"role": "user", "content": "17+25="}]}
    assert model.input_example == question and "messages" in model.metadata.signature.inputs.input_names()
    with pytest.raises(MlflowException, match="Failed to enforce schema"):
        model.predict("17+25=")  # a text has no chat template
    (outcome,) = model.predict({**question, "max_tokens": 3})
    with_template = pipeline.tokenizer.apply_chat_template(question["messages"], add_generation_prompt=True)[
        "input_ids"
    ]
    assert outcome["usage"]["prompt_tokens"] == len(with_template) == 8
    assert "17" not in outcome["choices"][0]["message"]["content"]
    shutil.rmtree(tmp_path / "cache")


def test_register_policy_and_fetch_model_of_a_run_with_two_policies(store, experiment, run, policies, tmp_path):
    weights, fetched = "model.safetensors", []
    for name in ("first", "first", "second", "second"):
        shutil.copytree(policies / name, tmp_path / "policy", dirs_exist_ok=True)
        register_policy(run, tmp_path / "policy", experiment, GOOD, "1+1=")
        folder = fetch_model("policy", f"runs:/{run.run_id}/policy", store, tmp_path / "cache")
        assert (folder / weights).read_bytes() == (policies / name / weights).read_bytes()
        fetched.append(folder)
    versions = run.client.search_model_versions(f"name='{experiment}'")
    assert len(versions) == 2
    assert fetched[0] == fetched[1] and fetched[2] == fetched[3] != fetched[0]


def test_a_resume_takes_the_first_of_two_policies_of_a_run(store, experiment, run, policies, tmp_path):
    resumed, named, fetched = RunFolder(tmp_path / "resumed"), f"runs:/{run.run_id}/policy", []
    for name in ("first", "second"):
        shutil.copytree(policies / name, tmp_path / "policy", dirs_exist_ok=True)
        register_policy(run, tmp_path / "policy", experiment, GOOD, "1+1=")
        versions = PinnedVersions.of_run(resumed)
        pinned = versions.pin_model("reference.path", named, store)
        versions.write(resumed.pinned_versions)
        fetched.append(fetch_model("reference.path", pinned, store, tmp_path / "cache"))
    assert fetched[0] == fetched[1] != fetch_model("reference.path", named, store, tmp_path / "cache")
    weights = "model.safetensors"
    assert (fetched[0] / weights).read_bytes() == (policies / "first" / weights).read_bytes()


def test_fetch_model_of_a_folder_among_the_artifacts_of_a_run(store, run, policies, tmp_path):
    run.client.log_artifacts(run.run_id, str(policies / "first"), "models/first")
    run.client.log_text(run.run_id, "no model", "notes/read.me")
    folder = fetch_model("policy", f"runs:/{run.run_id}/models/first", store, tmp_path / "cache")
    assert folder.parent == tmp_path / "cache" / run.run_id / "models" and folder.name.startswith("first-")
    assert {path.name for path in folder.iterdir()} == {path.name for path in (policies / "first").iterdir()}
    with pytest.raises(ConfigError, match=rf"policy=runs:/{run.run_id}/notes: there is no config.json"):
        fetch_model("policy", f"runs:/{run.run_id}/notes", store, tmp_path / "cache")


@pytest.fixture
def register(store, experiment, policies, tmp_path):
    """Register a policy as the next version of the experiment's model, and return the URI of its first version."""

    def register(policy):
        folder = RunFolder(tmp_path / f"run_{policy}")
        folder.path.mkdir()
        register_policy(
            open_run(store, experiment, folder, RunDescription()), policies / policy, experiment, GOOD, "1+1="
        )
        return f"models:/{experiment}/1"

    return register


def test_fetch_model_distinguishes_equal_versions_of_two_stores(register, store, experiment, policies, tmp_path):
    from mlflow import MlflowClient

    named = register("first")
    first = fetch_model("model.path", named, store, tmp_path / "cache")
    shutil.copyfile(store.removeprefix("sqlite:///"), tmp_path / "other.db")
    other = fetch_model("model.path", named, f"sqlite:///{tmp_path}/other.db", tmp_path / "cache")
    assert other != first
    MlflowClient(store).delete_registered_model(experiment)
    assert register("second") == named
    second = fetch_model("model.path", named, store, tmp_path / "cache")
    for folder, policy in ((first, "first"), (other, "first"), (second, "second")):
        weights = policies / policy / "model.safetensors"
        assert (folder / "model.safetensors").read_bytes() == weights.read_bytes()


def test_fetch_model_by_two_runs_at_once(register, store, tmp_path, monkeypatch):
    import mlflow

    named, found = register("first"), []
    download = mlflow.artifacts.download_artifacts

    def while_another_does(*arguments, **options):
        monkeypatch.setattr(mlflow.artifacts, "download_artifacts", download)
        fetched = download(*arguments, **options)
        found.append(fetch_model("model.path", named, store, tmp_path / "cache"))
        return fetched

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", while_another_does)
    found.append(fetch_model("model.path", named, store, tmp_path / "cache"))
    assert found[0] == found[1] and (found[0] / "config.json").is_file()
    assert list(found[0].parent.iterdir()) == [found[0]], "something is left behind"
    assert found[0].stat().st_mode & 0o777 == (tmp_path / "cache").stat().st_mode & 0o777


def test_fetch_model_removes_the_folder_of_a_killed_process(run, store, policies, tmp_path):
    run.client.log_artifacts(run.run_id, str(policies / "first"), "models")
    named = f"runs:/{run.run_id}/models"
    folder = fetch_model("model.path", named, store, tmp_path / "cache")
    # A killed process ends without its lock.
    left = folder.parent / f".{folder.name}.{socket.gethostname()}.left"
    left.mkdir()
    folder.rename(left / "model")
    # The process of another machine may live.
    other = folder.parent / f".{folder.name}.other.machine.left"
    other.mkdir()
    assert fetch_model("model.path", named, store, tmp_path / "cache") == folder
    assert {*folder.parent.iterdir()} == {folder, other} and (folder / "config.json").is_file()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("runs:/1/../../x", "model.path=runs:/1/../../x: name a model in MLflow as"),
        ("models:/../1", "model.path=models:/../1: name a model in MLflow as"),
        ("models:/adder", "model.path=models:/adder: name a model in MLflow as"),
        ("models:/nobody@champion", "nobody"),
        ("models:/nobody/7", "nobody"),
    ],
)
def test_fetch_model_refuses_a_missing_model_by_name(store, run, named, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        fetch_model("model.path", named, store, tmp_path)


@pytest.mark.parametrize("error", [NotImplementedError("logged models"), MlflowException("ENDPOINT_NOT_FOUND")])
def test_resolve_model_leaves_the_model_of_a_run_in_a_store_without_models_of_runs(
    store: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SimpleNamespace(info=SimpleNamespace(experiment_id="1"))
    client = SimpleNamespace(get_run=lambda run_id: run, search_logged_models=Mock(side_effect=error))
    monkeypatch.setattr(registry, "open_client", lambda store: client)
    assert resolve_model("model.path", "runs:/abc/policy", store) == "runs:/abc/policy"


def test_resolve_model_finds_the_newest_model_of_a_run_on_any_page(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(experiments: list[str], *, page_token: str | None, **options: Any) -> PagedList[Any]:
        models = {None: [("m-4", "other")], "next": [("m-3", "abc"), ("m-2", "abc")]}[page_token]
        page = [SimpleNamespace(model_id=model_id, source_run_id=run_id) for model_id, run_id in models]
        return PagedList(page, "next" if page_token is None else None)

    run = SimpleNamespace(info=SimpleNamespace(experiment_id="1"))
    client = SimpleNamespace(get_run=lambda run_id: run, search_logged_models=search)
    monkeypatch.setattr(registry, "open_client", lambda store: client)
    assert resolve_model("model.path", "runs:/abc/policy", store) == "models:/m-3"
