"""Pipelines: wrong options are reported with the stage before the first stage starts; resuming; help."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from rl_plugins.config.pipeline import PipelineConfig
from rl_plugins.config.recipe import RecipeConfig, public_options, write_config
from rl_plugins.config.schemas import register_schemas
from rl_plugins.errors import ConfigError, RunStopped, StorageError
from rl_plugins.launch import mlflow_run, pipeline
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.pipeline import (
    ParentRun,
    pipeline_main,
    run_pipeline,
    stage_configs,
)
from rl_plugins.launch.resume import note_end
from rl_plugins.run_folder import RunFolder, append_metrics, read_metrics
from rl_plugins.run_lock import owned
from rl_plugins.signals import ending_signals, stop_on_signals
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.tracking.store import open_client

DATA = ["model=/no/model", "data.sft=[a]", "data.pairs=[b]", "data.prompts=[c]"]

pytestmark = pytest.mark.usefixtures("_composed_once")


def run(*overrides: str) -> None:
    """Run the pipeline sft_rm_ppo."""
    run_pipeline(compose_config("sft_rm_ppo", [*overrides]))


@pytest.fixture
def good(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options of a pipeline whose files exist."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    train, test = f"{workplace}/train.parquet", f"{workplace}/test.parquet"
    return [
        f"model={workplace}/model", f"data.sft=[{train}]", f"data.pairs=[{train}]", f"data.prompts=[{train}]",
        f"data.val=[{test}]", f"output_dir={tmp_path}", "++common.tracking.enabled=false",
        "++common.placement.cpus_per_worker=0.5", "++common.sampling.max_tokens=6",
        "++common.data.max_prompt_tokens=26", "++common.launcher=local", "++common.rollout.engine=transformers",
    ]  # fmt: skip


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[RecipeConfig]:
    """Configurations of the stages that ran. Each stage only makes the folder of its model."""
    ran: list[RecipeConfig] = []

    def run_recipe(config: RecipeConfig, *_: object) -> None:
        ran.append(config)
        made = "reward_model" if config.stage == "reward_modeling" else "policy"
        (Path(config.run.output_dir) / config.run.name / made).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(pipeline, "run_recipe", run_recipe)
    return ran


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (DATA[:1] + DATA[2:], r"option 'data\.sft' has no value: add data\.sft=\.\.\. to the command line"),
        (DATA[1:], r"option 'model' has no value"),
        ([*DATA, "++common.run.stepz=3"], r"stage sft: there is no option 'run\.stepz'; did you mean 'run\.steps'\?"),
        (
            [*DATA, "++stages.ppo.options.guard.klx=1"],
            r"stage ppo: there is no option 'guard\.klx'; did you mean 'guard",
        ),
        (
            [*DATA, "++stages.ppo.options.tracking.upload_best=1"],
            r"stage ppo: tracking\.upload_best=1 is more than run",
        ),
        (
            [*DATA, "++common.run.dry_run=true"],
            r"common\.run\.dry_run: the pipeline sets this option: use dry_run",
        ),
        (
            [*DATA, "++stages.ppo.options.tracking.uri=x"],
            r"stages\.ppo\.options\.tracking\.uri: the pipeline sets this option: use tracking_uri",
        ),
        (DATA, r"stage sft: model\.path=/no/model: no such folder"),
    ],
    ids=[
        "no data of a stage",
        "no model",
        "common option",
        "option of a stage",
        "value of a stage",
        "common option of the pipeline",
        "option of the pipeline in a stage",
        "no model folder",
    ],
)
def test_run_pipeline_names_the_wrong_option(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*overrides, f"output_dir={tmp_path}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.pairs=[nope.parquet]"], r"stage reward_model: .*/nope\.parquet: there is no such file"),
        (["data.prompts=[no_column.parquet]"], r"stage ppo: .*no_column\.parquet: column 'reward_model' is missing"),
        (["++stages.ppo.options.reference.path=./gone"], r"stage ppo: reference\.path=\./gone: no such folder"),
        (
            ["++stages.ppo.choices=['reward=file']", "++stages.ppo.options.reward.functions.default.path=gone.py"],
            r"stage ppo: reward\.functions\.default\.path=.*gone\.py: there is no such file",
        ),
        (["++stages.ppo.options.algorithm.kl.estimator=k9"], r"stage ppo: algorithm\.kl\.estimator='k9' is unknown"),
        (["++stages.reward_model.options.optimizer.name=AdamWW"], r"stage reward_model: optimizer\.name=AdamWW: "),
    ],
    ids=["data file", "column", "reference", "reward", "algorithm", "optimizer"],
)
def test_run_pipeline_checks_the_files_of_all_stages_before_the_first_stage(
    overrides: list[str],
    message: str,
    good: list[str],
    stages: list[RecipeConfig],
    workplace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(workplace)
    with pytest.raises(ConfigError, match=message):
        run(*good, *overrides)
    assert stages == [] and list(tmp_path.iterdir()) == []


def test_run_pipeline_takes_the_defaults_of_missing_options(good: list[str], stages: list[RecipeConfig]) -> None:
    composed = compose_config("sft_rm_ppo", good)
    del composed.resume, composed.dry_run, composed.experiment
    plain = OmegaConf.create(OmegaConf.to_container(composed))
    assert isinstance(plain, DictConfig)
    run_pipeline(plain)
    assert [config.run.name for config in stages] == ["sft", "reward_model", "ppo"]
    assert stages[0].tracking.experiment == PipelineConfig().experiment


def test_run_pipeline_refuses_the_folder_of_a_running_pipeline(
    good: list[str], stages: list[RecipeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage, options = pipeline.run_recipe, [*good, "name=twice", "resume=auto"]

    def content() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in (tmp_path / "twice").rglob("*") if file.is_file()}

    def start_again(config: RecipeConfig, *further: Any) -> None:
        if config.run.name == "sft":
            before = content()
            with pytest.raises(ConfigError, match=r"/twice belongs to a running pipeline .*; give another name; or, "):
                run(*options, "++common.run.steps=7")
            assert content() == before
        run_stage(config, *further)

    monkeypatch.setattr(pipeline, "run_recipe", start_again)
    run(*options)
    assert [config.run.name for config in stages] == ["sft", "reward_model", "ppo"]
    with owned(RunFolder(tmp_path / "twice"), "pipeline"):
        pass


def test_run_pipeline_leaves_the_correction_to_the_device_of_a_stage(
    good: list[str], stages: list[RecipeConfig]
) -> None:
    run(*good, "++common.rollout.dtype=float32")
    ppo = stages[-1]
    assert ppo.algorithm["correction"] == "none"
    ppo.set_device("cuda")
    assert ppo.algorithm["correction"] == "token_tis"


def test_run_pipeline_only_checks_with_dry_run(
    good: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(*good, "dry_run=true")
    assert "sft: all checks have passed" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [tmp_path / "sft_rm_ppo"]
    assert not [*(tmp_path / "sft_rm_ppo").iterdir()]


def test_run_pipeline_writes_no_secret_and_hands_secrets_to_stages(
    good: list[str], stages: list[RecipeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    judge = "++stages.ppo.options.reward.functions.judge"
    secrets = [
        "tracking_uri=http://me:word@localhost:5000", f"{judge}._target_=json.dumps",
        f"{judge}.api_key=${{oc.env:JUDGE_KEY}}", f"{judge}.same=${{{judge.strip('+')}.api_key}}",
    ]  # fmt: skip
    run(*good, *secrets)
    text = (tmp_path / "sft_rm_ppo" / "pipeline.yaml").read_text()
    assert "sk-1" not in text and "word@" not in text and "tracking_uri: http://localhost:5000\n" in text
    assert text.count("${oc.env:JUDGE_KEY}") == 2
    ppo = stages[-1]
    assert ppo.reward.functions["judge"] == {"_target_": "json.dumps", "api_key": "sk-1", "same": "sk-1"}
    assert ppo.tracking.uri == "http://me:word@localhost:5000"
    assert public_options(ppo)["reward"]["functions"]["judge"]["same"] == "${oc.env:JUDGE_KEY}"


def test_run_pipeline_begins_again_if_no_stage_has_begun(
    good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ConfigError("few rows")

    monkeypatch.setattr(pipeline, "run_recipe", fails)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"stage sft: few rows"):
            run(*good, "++common.tracking.enabled=true")
    files = {path.name for path in (tmp_path / "sft_rm_ppo").iterdir()}
    assert files == {".lock", "pipeline.yaml"}, "there is an MLflow run"
    (tmp_path / "sft_rm_ppo" / "sft" / "checkpoint_00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="exists: continue it with resume=true"):
        run(*good)


def test_run_pipeline_resumes_with_the_stage_that_has_no_checkpoint(
    good: list[str], stages: list[RecipeConfig], workplace: Path, tmp_path: Path
) -> None:
    through, killed = (RunFolder(tmp_path / "sft_rm_ppo" / name) for name in ("sft", "reward_model"))
    shutil.copytree(workplace / "model", through.export)
    note_end(stage_configs(compose_config("sft_rm_ppo", [*good]))["sft"], through, 10**6)
    killed.path.mkdir()
    killed.config.touch()
    run(*good, "resume=true")
    assert {config.run.name: config.run.resume for config in stages} == {"reward_model": "auto", "ppo": "auto"}


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        (RunStopped("sft: stopped after step 3: SIGTERM"), 75, ". To continue, repeat the command with resume=auto"),
        (
            KeyboardInterrupt("sft: there is no checkpoint yet"),
            130,
            "checkpoint yet. To continue, repeat the command with resume=auto",
        ),
    ],
    ids=["stopped", "ctrl-c"],
)
def test_pipeline_main_names_the_option_that_resumes_the_pipeline(
    end: BaseException,
    status: int,
    message: str,
    good: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ends(*_: object) -> None:
        raise end

    monkeypatch.setattr(pipeline, "run_recipe", ends)
    monkeypatch.setattr(sys, "argv", ["sft_rm_ppo", *good])
    with pytest.raises(SystemExit) as exit_:
        pipeline_main("sft_rm_ppo")
    said = capsys.readouterr()
    assert exit_.value.code == status and message in (said.out + said.err).splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (["--cfg", "job"], ["name: sft_rm_ppo", "model: tiny", "  sft: ???"]),
        (["--cfg", "diff"], ["model: tiny  # recipe: ???"]),
        (
            ["--help"],
            [
                "model: tiny",
                "reward: code_tests, correct_and_format, environment, exact_match, file, gsm8k, judge, math_verify",
            ],
        ),
    ],
    ids=["cfg job", "cfg diff", "help"],
)
def test_pipeline_main_shows_the_options(
    flags: list[str],
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sft_rm_ppo", "model=tiny", *flags])
    # Hydra ends the process after --help.
    with suppress(SystemExit):
        pipeline_main("sft_rm_ppo")
    assert set(lines) <= set(capsys.readouterr().out.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_register_schemas_lets_hydra_share_one_store_but_no_nodes() -> None:
    register_schemas()
    store = ConfigStore.instance()
    assert deepcopy(store) is store
    first, second = (store.load("pipeline_record.yaml").node for _ in range(2))
    first.name = "changed"
    assert OmegaConf.is_missing(second, "name")


def test_stage_configs_store_stages_below_the_name_of_the_pipeline(
    good: list[str],
) -> None:
    stored = compose_config("sft_rm_ppo", [*good, "name=one run", "++common.run.storage='s3://bucket/runs?region=a'"])
    storages = {config.run.storage for config in stage_configs(stored).values()}
    assert storages == {"s3://bucket/runs/one%20run?region=a"}
    with pytest.raises(
        ConfigError, match=r"output_dir=s3://bucket: must be a folder .*: name the address as run\.storage"
    ):
        stage_configs(compose_config("sft_rm_ppo", [*good, "output_dir=s3://bucket"]))


def test_run_pipeline_copies_a_complete_stage_and_refuses_to_begin_anew_in_storage(
    good: list[str], stages: list[RecipeConfig], tmp_path: Path
) -> None:
    options = [*good, "name=stored", f"++common.run.storage={tmp_path}/there"]
    run(*options)
    assert [config.run.name for config in stages] == ["sft", "reward_model", "ppo"]
    stages.clear()
    run(*options, "resume=auto")
    assert [config.run.resume for config in stages] == ["auto"] * 3
    there = tmp_path / "there" / "stored" / "ppo" / "metrics.jsonl"
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_text("")
    shutil.rmtree(tmp_path / "stored")
    with pytest.raises(ConfigError, match=r"stage ppo: the run \S+/there/stored/ppo exists"):
        run(*options)


def test_run_pipeline_continues_a_complete_stage_with_more_steps(
    good: list[str], stages: list[RecipeConfig], tmp_path: Path
) -> None:
    options = [*good, "name=longer"]
    run(*options)
    for config in stages:
        note_end(config, RunFolder(tmp_path / "longer" / config.run.name), config.run.steps)
    steps = stages[-1].run.steps
    stages.clear()
    run(*options, "resume=auto")
    assert stages == []
    run(*options, "resume=auto", f"++stages.ppo.options.run.steps={steps + 1}")
    assert [config.run.name for config in stages] == ["ppo"]


def test_run_pipeline_refuses_to_continue_a_stage_whose_model_a_later_stage_has_begun_from(
    good: list[str], stages: list[RecipeConfig], tmp_path: Path
) -> None:
    options = [*good, "name=longer"]
    run(*options)
    for config in stages:
        folder = RunFolder(tmp_path / "longer" / config.run.name)
        folder.metrics.write_text('{"step": 1, "time": 0, "train/loss": 1}\n')
        folder.checkpoint(config.run.steps).mkdir(parents=True)
        note_end(config, folder, config.run.steps)
    steps = stages[0].run.steps
    stages.clear()
    with pytest.raises(ConfigError, match=r"stage sft: the stage would continue .*, and stage .* has results from its"):
        run(*options, "resume=auto", f"++stages.sft.options.run.steps={steps + 1}")
    assert stages == []


def test_sync_of_a_pipeline_gives_the_status_of_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sender:
        def __init__(self, *_: object) -> None:
            pass

        def send_metrics(self) -> None:
            pass

        def finish(self, status: str, _: float) -> None:
            given.append(status)

        def all_sent(self) -> bool:
            return False

    given: list[str] = []
    monkeypatch.setattr(pipeline, "RunSender", Sender)
    stages = "{first: {}, second: {}}"
    store = f"sqlite:///{tmp_path}/a.db"
    RunFolder(tmp_path).pipeline.write_text(f"experiment: own\ntracking_uri: {store}\nstages: {stages}\n")
    parent = ParentRun(tmp_path)
    first, second = parent.stages.values()
    note = '{"step": 3, "steps": 3, "target_reward": null}'
    first.export.mkdir(parents=True)
    first.finished.write_text(note)
    parent.sync(1)
    second.path.mkdir()
    second.error.write_text("out of memory")
    parent.sync(1)
    second.error.unlink()
    second.export.mkdir()
    # A killed stage that went on with more steps.
    parent.sync(1)
    second.finished.write_text(note)
    parent.sync(1)
    assert given == ["KILLED", "FAILED", "KILLED", "FINISHED"]


def test_log_validation_of_a_continued_stage_replaces_the_numbers(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    RunFolder(tmp_path).pipeline.write_text(f"experiment: own\ntracking_uri: {store}\nstages: {{ppo: {{}}}}\n")
    parent = ParentRun(tmp_path)
    (stage,) = parent.stages.values()
    stage.path.mkdir()
    for reward in (0.5, 0.5, 0.8):
        append_metrics(stage.metrics, {"val/reward": reward}, 10)
        parent.log_validation("ppo")
    assert parent.finish("FINISHED", 60)
    assert read_metrics(RunFolder(tmp_path).metrics)["ppo/val/reward"] == {1: 0.8}
    assert len(RunFolder(tmp_path).metrics.read_text().splitlines()) == 2
    client = open_client(store)
    run_id = RunFolder(tmp_path).tracking_run.read_text().strip()
    assert client.get_run(run_id).data.metrics["ppo/val/reward"] == 0.8


def test_sync_of_a_pipeline_sends_all_stages_and_reports_all_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[str] = []

    def sync(path: Path, *_: object) -> bool:
        sent.append(path.name)
        if path.name == "first":
            raise StorageError("first/config.yaml cannot be written")
        return path.name != "second"

    monkeypatch.setattr(mlflow_run, "sync", sync)
    store = f"sqlite:///{tmp_path}/a.db"
    stages = "{first: {}, second: {}, third: {}, not_begun: {}}"
    RunFolder(tmp_path).pipeline.write_text(f"experiment: own\ntracking_uri: {store}\nstages: {stages}\n")
    parent = ParentRun(tmp_path)
    monkeypatch.setattr(parent, "finish", lambda *_: True)
    monkeypatch.setattr(parent, "_sender", SimpleNamespace(send_metrics=lambda: None))
    for name in ("first", "second", "third"):
        parent.stages[name].path.mkdir()
        write_config(configured("sft", "model.path=model"), parent.stages[name].config)
    assert not parent.sync(1)
    assert sent == ["first", "second", "third"]
    assert [record.getMessage().partition(": rl-plugins sync")[0] for record in caplog.records] == [
        "stage first: first/config.yaml cannot be written",
        f"stage second: MLflow does not have all of {tmp_path / 'second'}",
    ]


def test_sync_of_a_pipeline_leaves_out_a_stage_without_tracking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def sync(path: Path, *_: object) -> bool:
        sent.append(path.name)
        return True

    monkeypatch.setattr(mlflow_run, "sync", sync)
    monkeypatch.setattr(pipeline, "_lacks_content", lambda *_: True)
    store = f"sqlite:///{tmp_path}/a.db"
    RunFolder(tmp_path).pipeline.write_text(
        f"experiment: own\ntracking_uri: {store}\nstages: {{tracked: {{}}, untracked: {{}}}}\n"
    )
    parent = ParentRun(tmp_path)
    monkeypatch.setattr(parent, "finish", lambda *_: True)
    monkeypatch.setattr(parent, "_sender", SimpleNamespace(send_metrics=lambda: None))
    for name, enabled in {"untracked": False, "tracked": True}.items():
        parent.stages[name].path.mkdir()
        config = configured("sft", "model.path=model", f"tracking.enabled={enabled}")
        write_config(config, parent.stages[name].config)
    parent.sync_stages(1)
    assert parent.sync(1)
    assert sent == ["tracked", "tracked"]


def test_sync_of_a_pipeline_leaves_a_moved_stage_in_the_other_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    sent: list[tuple[str, str]] = []

    def lacks_content(uri: str, stage: RunFolder) -> bool:
        asked.append((stage.path.name, uri))
        return True

    def sync(path: Path, uri: str, _: float) -> bool:
        sent.append((path.name, uri))
        return True

    monkeypatch.setattr(mlflow_run, "sync", sync)
    monkeypatch.setattr(pipeline, "_lacks_content", lacks_content)
    own, other = "http://own:5000", "http://other:5000"
    stages = "{moved: {}, kept: {}}"
    RunFolder(tmp_path).pipeline.write_text(f"experiment: own\ntracking_uri: {own}\nstages: {stages}\n")
    with_password = "http://user:secret@own:5000"
    parent = ParentRun(tmp_path, with_password)
    monkeypatch.setattr(parent, "finish", lambda *_: True)
    monkeypatch.setattr(parent, "_sender", SimpleNamespace(send_metrics=lambda: None))
    monkeypatch.setattr(pipeline, "check_store", lambda _: None)
    for name, store in {"moved": other, "kept": own}.items():
        parent.stages[name].path.mkdir()
        write_config(configured("sft", "model.path=model", f"tracking.uri={store}"), parent.stages[name].config)
    expected = [("moved", other), ("kept", with_password)]
    assert parent.sync(1)
    assert sent == expected and not asked
    parent.sync_stages(1)
    assert sent[2:] == expected and asked == expected


def test_run_pipeline_ends_before_the_next_stage_after_a_signal_at_the_end_of_a_stage(
    good: list[str], stages: list[RecipeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage: Any = pipeline.run_recipe

    def with_signal(config: RecipeConfig, *further: Any) -> Any:
        if config.run.name != "sft":
            return run_recipe(config, *further)
        folder = RunFolder(Path(config.run.output_dir) / config.run.name)
        with stop_on_signals(folder):
            os.kill(os.getpid(), signal.SIGTERM)
        folder.stop.unlink()
        return run_stage(config, *further)

    monkeypatch.setattr(pipeline, "run_recipe", with_signal)
    with ending_signals(), pytest.raises(RunStopped, match=r"reward_model: stopped before the start: SIGTERM"):
        run(*good)
    assert [config.run.name for config in stages] == ["sft"]
