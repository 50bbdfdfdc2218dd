"""`run.resume`: the same command starts a run, continues the run, or has nothing left to do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rl_plugins.config.recipe import RecipeConfig, write_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch import local, preflight
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.resume import check_resume, note_end
from rl_plugins.manifest import MANIFEST
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.files import flip_byte, rewrite_manifest
from rl_plugins.tests.launch.configurations import configured, message_of
from rl_plugins.tests.launch.test_bad_input import GOOD, IN_ONE_PROCESS
from rl_plugins.tests.repository.documentation import WRITTEN, blocks

STEPS = 4


@pytest.fixture(autouse=True)
def _in_workplace(workplace: Path, _composed_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)
    # The checks of models, data and rewards take seconds.
    monkeypatch.setattr(preflight, "preflight", preflight._check_output)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Checkpoint of each start of training. Training takes no step."""
    calls: list[str | None] = []

    def start(config: RecipeConfig, folder: RunFolder) -> None:
        newest = folder.latest_checkpoint()
        calls.append(None if newest is None else str(newest))

    monkeypatch.setattr(local, "train_in_this_process", start)
    return calls


def options(tmp_path: Path, *overrides: str) -> RecipeConfig:
    common = [*IN_ONE_PROCESS, "tracking.enabled=false", f"run.output_dir={tmp_path}", f"run.steps={STEPS}"]
    return configured("grpo", *GOOD, *common, *overrides)


def leave_failed_start(run: RunFolder) -> None:
    run.path.mkdir()
    for file in (run.config, run.installed_packages, run.error, run.stop, run.stopped):
        file.write_text("")


def leave_killed_early(run: RunFolder) -> None:
    """Leave a run that was killed after its first step and before its first checkpoint."""
    leave_failed_start(run)
    run.metrics.write_text('{"step": 1, "time": 1.0, "train/loss": 0.5}\n')


def leave_killed(run: RunFolder) -> None:
    leave_killed_early(run)
    run.checkpoint(2).mkdir()


def leave_without_export(run: RunFolder) -> None:
    leave_killed_early(run)
    run.checkpoint(STEPS).mkdir()


def leave_finished(run: RunFolder) -> None:
    leave_without_export(run)
    run.export.mkdir()
    note_end(options(run.path.parent), run, STEPS)


NEW = None
NEWEST = "the newest checkpoint"
NOTHING = "no start"
REFUSED = "refused"
OUTCOMES = [
    # (state, outcome with false, with true, with auto)
    (lambda run: None, NEW, REFUSED, NEW),
    (leave_failed_start, NEW, NEW, NEW),
    (leave_killed_early, REFUSED, NEW, NEW),
    (leave_killed, REFUSED, NEWEST, NEWEST),
    (leave_without_export, REFUSED, NEWEST, NEWEST),
    (leave_finished, REFUSED, NOTHING, NOTHING),
]


@pytest.mark.parametrize(("state", "false", "true", "auto"), OUTCOMES)
def test_run_recipe_starts_continues_or_does_nothing_as_fits(
    state: Callable[[RunFolder], None],
    false: str | None,
    true: str | None,
    auto: str | None,
    starts: list[str | None],
    tmp_path: Path,
) -> None:
    for number, (resume, expected) in enumerate({"false": false, "true": true, "auto": auto}.items()):
        run = RunFolder(tmp_path / str(number) / "grpo")
        run.path.parent.mkdir()
        state(run)
        newest = run.latest_checkpoint()
        try:
            run_recipe(options(run.path.parent, f"run.resume={resume}"))
            outcome = starts.pop() if starts else NOTHING
        except ConfigError:
            outcome = REFUSED
        assert outcome == (str(newest) if expected == NEWEST else expected), resume


def test_run_recipe_says_that_the_run_is_finished(
    starts: list[str | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_finished(RunFolder(tmp_path / "grpo"))
    run_recipe(options(tmp_path, "run.resume=auto"))
    said = capsys.readouterr().out
    assert said.startswith(f"grpo: the run is finished: step {STEPS} was its last, and {tmp_path}/grpo has its results")
    assert said.count("\n") == 1 and starts == []


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.export.rmdir(),
        lambda run: run.finished.unlink(),
        lambda run: run.finished.write_text(""),
    ],
    ids=["export removed", "killed between export and the note of the end", "damaged note of the end"],
)
def test_run_recipe_goes_on_with_a_trained_run_without_an_export(
    change: Callable[[RunFolder], None], starts: list[str | None], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "grpo")
    leave_finished(run)
    change(run)
    run_recipe(options(tmp_path, "run.resume=auto"))
    assert starts == [str(run.checkpoint(STEPS))]


def test_run_recipe_continues_a_finished_run_with_more_steps(starts: list[str | None], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "grpo")
    leave_finished(run)
    run_recipe(options(tmp_path, "run.resume=auto", f"run.steps={STEPS + 1}"))
    assert starts == [str(run.checkpoint(STEPS))] and not run.finished.exists()


def test_finished_step_counts_a_run_that_ended_early_by_itself(starts: list[str | None], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "grpo")
    leave_without_export(run)
    run.export.mkdir()
    note_end(options(tmp_path, "run.steps=9", "run.target_reward=0.5"), run, STEPS)
    run_recipe(options(tmp_path, "run.resume=auto", "run.steps=9", "run.target_reward=0.5"))
    assert starts == []
    run_recipe(options(tmp_path, "run.resume=auto", "run.steps=9", "run.target_reward=0.9"))
    assert starts == [str(run.checkpoint(STEPS))]


def test_copy_of_a_finished_run_repeats_a_step_after_the_commands_of_the_page(
    starts: list[str | None], tmp_path: Path
) -> None:
    run, again = RunFolder(tmp_path / "grpo"), RunFolder(tmp_path / "again")
    leave_finished(run)
    run.checkpoint(STEPS - 1).mkdir()
    shutil.copytree(run.path, again.path)
    again.checkpoint(STEPS).rmdir()
    (block,) = (block for block in blocks(WRITTEN["docs/callbacks.md"], "bash") if "run.name=again" in block)
    removed = re.findall(r"^rm (.*)$", block, re.MULTILINE)
    for file in re.findall(r"outputs/again/(\S+)", " ".join(removed)):
        (again.path / file).unlink(missing_ok=True)
    run_recipe(options(tmp_path, "run.name=again", "run.resume=true"))
    assert starts == [str(again.checkpoint(STEPS - 1))]


def test_check_resume_names_auto_where_true_finds_no_folder(starts: list[str | None], tmp_path: Path) -> None:
    message = message_of(lambda: run_recipe(options(tmp_path, "run.resume=true")))
    assert message.endswith("start it without run.resume, or with run.resume=auto") and starts == []


def refused_change(tmp_path: Path, run: RunFolder, others: tuple[str, ...], option: str, saved: str, now: str) -> str:
    """Return the message of a resume with another value of an option than in the run's config.yaml."""
    write_config(options(tmp_path, *others, f"{option}={saved}"), run.config)
    return message_of(partial(run_recipe, options(tmp_path, *others, f"{option}={now}")))


def test_check_resume_refuses_a_change_of_the_quantization(starts: list[str | None], tmp_path: Path) -> None:
    run, adapter = RunFolder(tmp_path / "grpo"), ("run.resume=auto", "model.lora.rank=4")
    leave_killed(run)
    option = "model.lora.quantization"
    for saved, now in (("nf4", "null"), ("null", "nf4")):
        assert refused_change(tmp_path, run, adapter, option, saved, now) == (
            f"{option}={now}: the adapter in the checkpoints of {run.path} was trained over weights with "
            f"{option}={saved}: resume with {option}={saved}, or give another run.name"
        )
    assert starts == []
    run_recipe(options(tmp_path, *adapter))
    assert starts == [str(run.checkpoint(2))]


def test_check_resume_refuses_another_scale_of_the_adapter(starts: list[str | None], tmp_path: Path) -> None:
    run, adapter = RunFolder(tmp_path / "grpo"), ("run.resume=auto", "model.lora.rank=4")
    leave_killed(run)
    option = "model.lora.alpha"
    assert refused_change(tmp_path, run, adapter, option, "32", "16") == (
        f"{option}=16: the adapter in the checkpoints of {run.path} was trained with {option}=32: resume with "
        f"{option}=32, or give another run.name"
    )
    assert starts == []


def test_check_resume_takes_a_folder_with_versions_alone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "grpo")
    run.path.mkdir()
    run.pinned_versions.write_text("{}")
    check_resume(options(tmp_path, "run.resume=auto"), run)


def test_check_resume_refuses_another_start_of_the_adapter(starts: list[str | None], tmp_path: Path) -> None:
    run, one, other = RunFolder(tmp_path / "grpo"), tmp_path / "one", tmp_path / "other"
    leave_killed(run)
    for folder in (one, other):
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text(folder.name)
    shutil.copytree(one, tmp_path / "copy")
    adapter, option = ("run.resume=auto", "model.lora.rank=4"), "model.lora.path"
    for saved, now in ((one, "null"), ("null", one), (one, other)):
        assert refused_change(tmp_path, run, adapter, option, str(saved), str(now)) == (
            f"{option}={now}: the checkpoints of {run.path} are of {option}={saved}, another start of the adapter: "
            f"resume with {option}={saved}, or give another run.name"
        )
    assert starts == []
    write_config(options(tmp_path, *adapter, f"{option}={one}"), run.config)
    run_recipe(options(tmp_path, *adapter, f"{option}={tmp_path / 'copy'}"))
    assert starts == [str(run.checkpoint(2))]
    run.config.write_text(run.config.read_text().replace(str(tmp_path / "copy"), "${oc.env:NOT_SET}"))
    assert "of model.lora.path=${oc.env:NOT_SET}" in message_of(partial(run_recipe, options(tmp_path, *adapter)))
    run_recipe(options(tmp_path, *adapter, f"{option}={one}"))
    assert starts == [str(run.checkpoint(2))] * 2


def test_check_resume_names_a_damaged_configuration(starts: list[str | None], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "grpo")
    leave_killed(run)
    run.config.write_text("run: [1")
    message = message_of(partial(run_recipe, options(tmp_path, "run.resume=auto")))
    assert message.startswith(f"{run.config}: not valid YAML")
    assert message.endswith(": replace the file with an intact copy, or give another run.name") and starts == []


def test_check_resume_refuses_another_stage(starts: list[str | None], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "grpo")
    leave_killed(run)
    write_config(configured("sft", *GOOD), run.config)
    message = message_of(partial(run_recipe, options(tmp_path, "run.resume=auto")))
    assert message == (
        f"stage=policy_optimization: the checkpoints of {run.path} are of stage=sft: resume with the recipe of the "
        "run, or give another run.name"
    )
    assert starts == []


def test_check_resume_refuses_another_model_and_accepts_a_copy(workplace: Path, tmp_path: Path) -> None:
    run, first, other, copy = RunFolder(tmp_path / "grpo"), workplace / "model", tmp_path / "other", tmp_path / "copy"
    leave_killed(run)
    for folder in (other, copy):
        shutil.copytree(first, folder)
    flip_byte(other / "model.safetensors", 2000)
    config = options(tmp_path, "run.resume=auto")

    def said(group: str, saved: object, now: object) -> str:
        run.config.write_text(f"{group}:\n  path: {saved}\n")
        getattr(config, group).path = str(now)
        return message_of(partial(check_resume, config, run))

    hub = f"owner/name@{'1' * 40}"
    for group in ("model", "critic"):
        option = f"{group}.path"
        for saved, now in ((other, copy), (hub, f"owner/other@{'1' * 40}"), (hub, f"owner/name@{'2' * 40}")):
            assert said(group, saved, now) == (
                f"{option}={now}: the checkpoints of {run.path} are of {option}={saved}, with other weights: resume "
                f"with {option}={saved}, or give another run.name"
            )
        # A folder that is gone was moved, or is on another machine.
        for saved, now in ((first, copy), ("/gone", first), (hub, hub), (hub, first), ("${oc.env:NO_VARIABLE}", first)):
            assert said(group, saved, now) == "nothing is refused"


def test_run_recipe_copies_the_rest_of_a_finished_run_to_storage_and_fetches_the_run(
    starts: list[str | None], tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    config = partial(options, tmp_path / "runs", f"run.storage={tmp_path}/there", "run.resume=auto")
    run = RunFolder(tmp_path / "runs" / config().run.name)
    leave_finished(run)
    rewrite_manifest(run.checkpoint(STEPS))
    (run.export / "config.json").touch()
    run_recipe(config())
    there = tmp_path / "there" / run.path.name
    assert (there / "finished.json").is_file() and (there / run.checkpoint(STEPS).name / MANIFEST).is_file()
    shutil.rmtree(run.path)
    run_recipe(config())
    assert run.finished.is_file() and starts == []
