"""Policies in the model registry, and starting from them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from rl_plugins.callbacks.mlflow_run import Facts, open_run
from rl_plugins.callbacks.registry import Evaluation, judge, register_policy
from rl_plugins.errors import ConfigError
from rl_plugins.launch.registered_model import fetch
from rl_plugins.run_folder import RunFolder

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
def test_only_a_better_policy_takes_the_place(evaluation, champion, wins, reason):
    outcome, said = judge(evaluation, champion)
    assert outcome is wins and reason in said


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    from rl_plugins.models.tiny import save_tiny_policy

    folder = tmp_path_factory.mktemp("policies")
    for name in ("first", "second"):
        save_tiny_policy(folder / name, seed=len(name))
    return folder


def test_the_champion_is_loaded_by_its_name(store, experiment, policies, tmp_path):
    import mlflow

    said = []
    for name, value in (("first", 0.5), ("second", 0.6), ("first", 0.4)):
        folder = RunFolder(tmp_path / f"{name}{value}")
        folder.path.mkdir()
        run = open_run(store, experiment, folder, Facts())
        evaluation = replace(GOOD, value=value)
        for _ in range(2):  # a second try finds what the first one made
            said.append(register_policy(run, policies / name, experiment, evaluation, "17+25="))
    starts = [f"{experiment} version {version}, {what} champion" for version, what in ((1, "the"), (2, "the"))]
    assert said[0].startswith(starts[0]) and said[2].startswith(starts[1])
    assert said[5].startswith(f"{experiment} version 3, not the champion: val/reward 0.4 against 0.6")

    named = f"models:/{experiment}@champion"
    champion = fetch("model.path", named, store, tmp_path / "cache")
    assert champion == tmp_path / "cache" / experiment / "2"
    weights = "model.safetensors"
    assert (champion / weights).read_bytes() == (policies / "second" / weights).read_bytes()
    assert (champion / "tokenizer.json").is_file()
    kept = (champion / weights).stat().st_mtime_ns
    assert fetch("model.path", f"models:/{experiment}/2", store, tmp_path / "cache") == champion
    assert (champion / weights).stat().st_mtime_ns == kept, "it was fetched again"

    pipeline = mlflow.transformers.load_model(named)
    (answer,) = pipeline("17+25=", max_new_tokens=2)
    assert answer["generated_text"].startswith("17+25=")
    model = mlflow.pyfunc.load_model(named)
    assert [column.type.name for column in model.metadata.signature.inputs] == ["string"]
    assert model.input_example is not None
    assert model.predict(["17+25="])[0].startswith("17+25=")
    shutil.rmtree(tmp_path / "cache")


def test_a_folder_among_a_runs_artifacts_is_a_model_too(store, run, policies, tmp_path):
    run.client.log_artifacts(run.run_id, str(policies / "first"), "models/first")
    run.client.log_text(run.run_id, "no model", "notes/read.me")
    folder = fetch("policy", f"runs:/{run.run_id}/models/first", store, tmp_path / "cache")
    assert folder == tmp_path / "cache" / run.run_id / "models" / "first"
    assert {path.name for path in folder.iterdir()} == {path.name for path in (policies / "first").iterdir()}
    with pytest.raises(ConfigError, match=rf"policy=runs:/{run.run_id}/notes: there is no config.json"):
        fetch("policy", f"runs:/{run.run_id}/notes", store, tmp_path / "cache")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("models:/adder", "model.path=models:/adder: name a model in MLflow as"),
        ("models:/nobody@champion", "nobody"),
        ("models:/nobody/7", "nobody"),
    ],
)
def test_a_model_that_is_not_there_is_named(store, run, named, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        fetch("model.path", named, store, tmp_path)
