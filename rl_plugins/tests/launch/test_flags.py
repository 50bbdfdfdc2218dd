"""Flags of Hydra between the overrides of a command line, and files of Hydra."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import TrainingDiverged
from rl_plugins.launch import command_line
from rl_plugins.launch.command_line import recipe_main
from rl_plugins.launch.compose import compose_for_command_line

OVERRIDES = ["model.path=x", "data.train_files=[y]", "run.steps=3"]


def test_flags_may_follow_overrides_and_deletions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo", "~algorithm.kl", *OVERRIDES, "--cfg", "job", "-p", "algorithm"])
    assert compose_for_command_line("grpo") == []
    shown = capsys.readouterr().out
    assert "advantage: grpo" in shown and "kl:" not in shown


@pytest.mark.parametrize("flags", [("--config-dir", "--config-name"), ("-cd", "-cn")])
def test_value_of_a_flag_may_have_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, str]
) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    (folder / "mine.yaml").write_text("defaults: [grpo, _self_]\nrun: {seed: 7}\n")
    monkeypatch.setattr(sys, "argv", ["grpo", *OVERRIDES, flags[0], str(folder), flags[1], "mine", "run.name=z"])
    ((config, recipe),) = compose_for_command_line("grpo")
    assert recipe == "grpo"
    assert (config.run.seed, config.run.steps, config.run.name) == (7, 3, "z")


def test_multirun_leaves_no_file_with_the_options_and_the_command_as_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = ["grpo", "--multirun", *OVERRIDES, "optimizer.lr=1e-5,2e-5"]
    monkeypatch.setattr(sys, "argv", [*command])
    assert len(compose_for_command_line("grpo")) == 2
    assert [*tmp_path.iterdir()] == [] and sys.argv == command


def test_multirun_goes_on_after_a_run_that_diverges(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates: list[float] = []

    def run_recipe(config: RecipeConfig, _: str | None) -> None:
        rates.append(config.optimizer.lr)
        if config.optimizer.lr == 1.0:
            raise TrainingDiverged("the loss is NaN")

    monkeypatch.setattr(command_line, "run_recipe", run_recipe)
    monkeypatch.setattr(sys, "argv", ["grpo", "--multirun", *OVERRIDES, "optimizer.lr=0.5,1.0,0.25"])
    with pytest.raises(SystemExit) as end:
        recipe_main("grpo")
    assert end.value.code == 2 and rates == [0.5, 1.0, 0.25]
    assert capsys.readouterr().err.count("the loss is NaN") == 1
    monkeypatch.setattr(sys, "argv", ["grpo", *OVERRIDES, "optimizer.lr=1.0"])
    with pytest.raises(SystemExit) as end:
        recipe_main("grpo")
    assert end.value.code == 2 and capsys.readouterr().err == "error: the loss is NaN\n"
