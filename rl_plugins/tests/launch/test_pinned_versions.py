"""Models and data of the Hugging Face hub in a recipe: one commit for a run and its resumes, and early refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from huggingface_hub import constants
from omegaconf import OmegaConf

from rl_plugins.commands.plan import read_shape
from rl_plugins.config.recipe import parse_config
from rl_plugins.hub.names import HubName
from rl_plugins.launch import fetch as launch_fetch
from rl_plugins.launch import local, pinned_versions, ray_train
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.fetch import fetch_data_files, fetch_models
from rl_plugins.launch.pinned_versions import PinnedVersions
from rl_plugins.launch.pipeline import run_pipeline
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.hub.hub_server import StandIn, serving, use
from rl_plugins.tests.launch.configurations import configured, message_of

IN_ONE_PROCESS = (
    "launcher=local", "rollout.engine=transformers", "reward.num_workers=0", "tracking.enabled=false",
    "placement.num_workers=1", "placement.device=cpu", "sampling.max_tokens=6", "data.max_prompt_tokens=26",
)  # fmt: skip
TRAIN = "data.train_files=[hf://datasets/own/rows/data/train-*.parquet]"
Check = Callable[..., str]


@pytest.fixture
def hub(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _composed_once: None) -> Iterator[StandIn]:
    """A hub with the model `own/model` and the data set `own/rows`, and a working directory without files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)
    rows, few = ((workplace / f"{name}.parquet").read_bytes() for name in ("train", "few"))
    with serving() as stand_in:
        use(stand_in, tmp_path / "cache", monkeypatch)
        stand_in.add("models/own/model", workplace / "model")
        files = {"data/train-0.parquet": rows, "data/train-1.parquet": rows, "data/test.parquet": few, "a.jsonl": b"{}"}
        stand_in.add("datasets/own/rows", files)
        yield stand_in


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run a recipe without a launcher; return the message of the ConfigError."""
    for module, launcher in ((ray_train, "train_on_ray"), (local, "train_in_this_process")):
        monkeypatch.setattr(module, launcher, lambda *_: None)

    def run(*overrides: str) -> str:
        return message_of(lambda: run_recipe(configured("grpo", *IN_ONE_PROCESS, TRAIN, *overrides)))

    return run


def test_run_recipe_takes_one_commit_for_a_run_and_all_resumes(hub: StandIn, check: Check, capsys) -> None:
    options = (
        "model.path=own/model",
        "reference.path=own/model@main",
        "data.val_files=[hf://datasets/own/rows/data/test.parquet]",
    )
    first, rows = (hub.repositories[name].refs["main"] for name in ("models/own/model", "datasets/own/rows"))
    assert check(*options) == "nothing is refused"
    folder = RunFolder("outputs/grpo")
    assert json.loads(folder.pinned_versions.read_text()) == {
        "models/own/model@main": first,
        "datasets/own/rows@main": rows,
    }
    written = OmegaConf.load(folder.config)
    assert written.model.path == written.reference.path == f"own/model@{first}"
    copies = Path(f"outputs/.data/own--rows-{rows[:12]}/data").absolute()
    assert written.data.train_files == [str(copies / f"train-{number}.parquet") for number in range(2)]
    assert written.data.val_files == [str(copies / "test.parquet")]
    assert f"grpo: own/model is own/model@{first}" in capsys.readouterr().out
    assert len(hub.downloads("model.safetensors")) == 1

    model = hub.repositories["models/own/model"].commits[first]
    later = hub.add("models/own/model", {**model, "extra.json": b"{}"})
    hub.add("datasets/own/rows", {})
    hub.requests.clear()
    assert check(*options, "run.resume=auto") == "nothing is refused"
    assert OmegaConf.load(folder.config).model.path == f"own/model@{first}" and hub.requests == []
    assert PinnedVersions().pin("model.path", HubName("own/model")).revision == later
    folder.pinned_versions.write_text("[1]")
    assert f"{folder.pinned_versions.absolute()} is damaged" in check(*options, "run.resume=auto")


def test_pin_model_keeps_the_version_of_an_alias_for_all_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, newest = PinnedVersions(), mock.Mock(side_effect=["models:/solver/2", "models:/solver/3"])
    monkeypatch.setattr(pinned_versions, "resolve_model", newest)
    folder = RunFolder(tmp_path)
    for _ in range(2):
        assert versions.pin_model("reference.path", "models:/solver@champion", "sqlite:///db") == "models:/solver/2"
        versions.write(folder.pinned_versions)
        versions = PinnedVersions.of_run(folder)
    assert newest.call_count == 1


def test_run_recipe_fetches_no_weights_of_the_hub_in_a_dry_run(hub: StandIn, check: Check, workplace: Path) -> None:
    assert check("model.path=own/model", "run.dry_run=true") == "nothing is refused"
    assert hub.downloads(".safetensors") == [] and not Path("outputs/grpo").exists()
    hub.add("models/own/half", workplace / "half_weights")
    assert check("model.path=own/half", "run.dry_run=true") == "nothing is refused"
    assert "not a whole safetensors file" in check("model.path=own/half")


def test_run_recipe_names_the_fault_of_a_model_of_the_hub(hub: StandIn, check: Check, workplace: Path) -> None:
    hub.add("models/own/private", workplace / "model", access="private")
    hub.add("models/own/gated", workplace / "model", access="gated")
    hub.add("models/own/no_weights", {"config.json": b"{}"})
    hub.add("models/own/code", workplace / "own_code")
    model = "model.path=own/model"
    wrong = []
    for overrides, words in (
        (["model.path=own/private"], "model.path=own/private: there is no such folder here, and"),
        (["model.path=own/gated"], "the repository is gated, and there is no token"),
        (["model.path=own/no_weights"], "no weights of transformers, such as model.safetensors (it has config.json)"),
        ([model, "model.revision=v9"], "model.path=own/model@v9: the repository has no revision 'v9'"),
        ([model, "critic.path=own/nothing"], "critic.path=own/nothing: there is no such folder here"),
        ([model, "teacher.paths={a: own/gone}", "teacher.path=null"], "teacher.paths.a=own/gone: there is no such"),
        (["model.path=own/code"], "config.json names Python code of the model (auto_map)"),
        (
            [model, "data.train_files=[hf://datasets/own/rows/b]"],
            "data.train_files=hf://datasets/own/rows/b: the repos",
        ),
    ):
        message = check(*overrides)
        wrong += [f"{words!r} is not in {message!r}"] if words not in message or "\n" in message else []
    assert wrong == []
    hub.failing = 503
    local = f"data.train_files=[{workplace}/train.parquet]"
    assert f"model.path=own/other: {hub.address} does not answer" in check("model.path=own/other", local)


def test_fetch_data_files_names_the_fault_of_an_address(hub: StandIn, tmp_path: Path, monkeypatch) -> None:
    hub.add("datasets/own/secret", {"a.parquet": b""}, access="private")

    def refusal(address: str) -> str:
        return message_of(lambda: fetch_data_files(PinnedVersions(), "data.val_files", address, tmp_path / "copies"))

    wrong = []
    for address, words in (
        ("own/secret/a.parquet", f"data.val_files=hf://datasets/own/secret: {hub.address} has no such repository, or"),
        ("own/rows@v9/data", "hf://datasets/own/rows@v9: the repository has no revision 'v9'"),
        ("own/rows/train.parquet", "the repository has no such file (it has data/train-0.parquet, data/"),
        ("own/rows/a.jsonl", "a.jsonl is not a parquet file: convert it with `rl-plugins prepare`, or name"),
        ("own/rows", "data.val_files=hf://datasets/own/rows: must be hf://datasets/OWNER/NAME/PATH"),
    ):
        message = refusal(f"hf://datasets/{address}")
        wrong += [f"{words!r} is not in {message!r}"] if words not in message or "\n" in message else []
    assert wrong == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "hf download own/other --repo-type dataset" in refusal("hf://datasets/own/other/a.parquet")


def test_fetch_models_pins_the_model_of_a_reward_and_all_teachers(hub: StandIn) -> None:
    commit = hub.repositories["models/own/model"].refs["main"]
    node = "{_target_: rl_plugins.rewards.model.ModelReward, path: own/model}"
    teachers = ["teacher.paths={a: own/model, b: /some/folder}", "model.path=own/model@main"]
    config = configured("grpo", *teachers, f"reward.functions={{default: {node}}}")
    fetch_models(config, PinnedVersions())
    pinned = f"own/model@{commit}"
    assert config.reward.functions["default"]["path"] == config.model.path == pinned
    assert config.teacher.paths == {"a": pinned, "b": "/some/folder"}
    # `plan` has read the config.json, which is small.
    assert "a plan needs these sizes" in message_of(lambda: read_shape("model.path", "own/model"))


def test_model_revision_belongs_to_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "here").mkdir(parents=True)

    def path(**model: str) -> str:
        return parse_config({"stage": "sft", "model": model, "run": {"name": "r"}}).model.path

    assert path(path="own/model", revision="v1") == "own/model@v1" == path(path="own/model@v1", revision="v1")
    assert "model.revision=v1: path=own/here is a folder" in message_of(lambda: path(path="own/here", revision="v1"))
    assert "leave one of them out" in message_of(lambda: path(path="own/model@v2", revision="v1"))
    # A folder comes before a name of the hub.
    assert path(path="own/here") == str(tmp_path / "own" / "here")


def test_run_pipeline_takes_one_commit_for_all_stages_and_resumes_on_another_machine(
    hub: StandIn, check: Check, tmp_path: Path
) -> None:
    stage = {
        "recipe": "grpo",
        "options": {
            "run": {"storage": f"file://{tmp_path}/storage"},
            "model": {"path": "own/model"}, "launcher": "local", "rollout": {"engine": "transformers"},
            "reward": {"num_workers": 0}, "tracking": {"enabled": False},
            "placement": {"device": "cpu", "num_workers": 1}, "sampling": {"max_tokens": 6},
            "data": {"max_prompt_tokens": 26, "train_files": ["hf://datasets/own/rows/data/train-0.parquet"]},
        },
    }  # fmt: skip
    pipeline = {"name": "p", "model": "own/model", "folder": "outputs/p", "stages": {"a": stage, "b": stage}}
    commits = {name: repository.refs["main"] for name, repository in hub.repositories.items()}
    model, rows = commits["models/own/model"], commits["datasets/own/rows"]
    folder = run_pipeline(OmegaConf.create(pipeline))
    versions = {f"{name}@main": commit for name, commit in commits.items()}
    assert json.loads(RunFolder(folder).pinned_versions.read_text()) == versions
    for name in "ab":
        assert json.loads(RunFolder(folder / name).pinned_versions.read_text()).items() >= versions.items()
        assert OmegaConf.load(folder / name / "config.yaml").model.path == f"own/model@{model}"
    # Another machine has no folder of the pipeline, and the branch has other rows now.
    (tmp_path / "storage" / "p" / "a" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    shutil.rmtree(folder)
    hub.add("datasets/own/rows", {})
    assert run_pipeline(OmegaConf.create({**pipeline, "resume": "auto"})) == folder
    for name in "ab":
        assert f"own--rows-{rows[:12]}" in OmegaConf.load(folder / name / "config.yaml").data.train_files[0]


def test_fetch_data_files_takes_the_hubs_own_conversion(hub: StandIn, tmp_path: Path) -> None:
    hub.add("datasets/own/rows", {"main/train/0.parquet": b"rows"}, ref="refs/convert/parquet")
    address = "hf://datasets/own/rows@refs/convert/parquet/main/train"
    (file,) = fetch_data_files(PinnedVersions(), "data.train_files", address, tmp_path / "copies")
    assert Path(file).read_bytes() == b"rows" and file.endswith("/main/train/0.parquet")


def test_fetch_data_files_makes_whole_copies_for_two_runs_at_once(hub: StandIn, tmp_path: Path, monkeypatch) -> None:
    hub.add("datasets/own/one", {"a.parquet": b"whole"})
    copied: list[Path] = []

    def fetch() -> Path:
        address = "hf://datasets/own/one/a.parquet"
        return Path(*fetch_data_files(PinnedVersions(), "data.train_files", address, tmp_path / "copies"))

    def copy_slowly(source: Path, target: Path) -> None:
        with open(target, "xb") as file:
            file.write(b"who")
            if not copied:
                copied.append(target)
                # Another run comes while a half is written.
                assert fetch().read_bytes() == b"whole"
            file.write(b"le")

    monkeypatch.setattr(launch_fetch, "link_or_copy", copy_slowly)
    copy = fetch()
    assert copied and copy.read_bytes() == b"whole" and list(copy.parent.iterdir()) == [copy]
    copy.write_bytes(b"who")
    assert fetch().read_bytes() == b"whole"
