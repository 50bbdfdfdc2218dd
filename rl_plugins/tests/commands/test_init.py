"""`rl-plugins init`, recipes as commands, and options of other projects."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rl_plugins.commands.init import TEMPLATE
from rl_plugins.commands.main import main
from rl_plugins.tests.loops import for_each


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects") / "solver"
    assert main(["init", str(folder)]) == 0
    return folder


def test_init_writes_a_project_whose_recipe_passes_all_checks(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert {path.name for path in TEMPLATE.iterdir() if path.is_file()} < {path.name for path in project.iterdir()}
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", ["rl-plugins"])
    assert main(["recipe.yaml", "run.dry_run=true", "run.steps=3"]) == 0
    assert "first: all checks have passed: 3 RL steps of 8 prompts x 8 samples" in capfd.readouterr().out
    assert main(["recipe.yaml", "--cfg", "diff", "run.steps=3"]) == 0
    differing = capfd.readouterr().out.splitlines()
    assert "run.steps: 3  # recipe: 100" in differing and "launcher: local  # recipe: ray" in differing


@for_each("options", [[], ["--cfg", "diff"]])
def test_recipe_of_the_user_with_the_name_of_a_packaged_recipe_is_refused(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra would find the packaged file first, and leave out all options of the user."""
    file = tmp_path / "gsm8k_grpo.yaml"
    file.write_text("defaults: [grpo, _self_]\nrun: {steps: 7}\n")
    monkeypatch.setattr(sys, "argv", ["rl-plugins"])
    with pytest.raises(SystemExit, match="2"):
        main([str(file), *options])
    assert f"error: {file}: a recipe of the package has this name: rename the file" in capsys.readouterr().err


def test_init_refuses_a_folder_with_content(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(project)]) == 2
    assert f"error: {project} exists and is not empty: name a new folder" in capsys.readouterr().err


def test_recipe_is_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rl-plugins"])
    assert main(["sft", "--cfg", "job", "model.path=somewhere"]) == 0
    shown = capsys.readouterr().out
    assert "stage: sft" in shown and "path: somewhere" in shown


@for_each(
    ("words", "message"),
    [
        (["gone.yaml"], "gone.yaml: "),
        (["empty.yaml"], "empty.yaml: its defaults must begin with a recipe: grpo, "),
        (["list.yaml"], "list.yaml: "),
        (["gpro"], "there is no command 'gpro'; did you mean 'grpo'?"),
        (
            ["grpo", "actor_rollout_ref.rollout.n=8"],
            "no option 'actor_rollout_ref.rollout.n'; verl has it, and here it is batch.samples_per_prompt",
        ),
        (["grpo", "num_generations=8"], "'num_generations'; TRL has it, and here it is batch.samples_per_prompt"),
        (["grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=8"], "and here it is batch.updates_per_step"),
        (["grpo", "data.train_batch_size=8"], "verl has it, and here it is batch.prompts_per_step"),
        (
            ["grpo", "--rollout_batch_size", "8"],
            "--rollout_batch_size: an option is key=value; OpenRLHF has it, and here it is batch.prompts_per_step",
        ),
    ],
)
def test_wrong_recipes_and_options_of_other_projects_are_explained(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rl-plugins"])
    Path("empty.yaml").touch()
    Path("list.yaml").write_text("- grpo\n")
    try:
        status: object = main(words)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capfd.readouterr().err
