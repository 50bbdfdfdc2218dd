"""The console script: all commands, the help of each, and messages about wrong arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rl_plugins.commands.main import COMMANDS, main
from rl_plugins.tests.patience import patient
from rl_plugins.tests.repository.test_import_weight import HEAVY


def test_main_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and summary in shown for name, summary in COMMANDS.items())
    assert main([]) == 2


def test_main_refuses_the_end_of_the_process_by_code_of_the_user(monkeypatch, capsys):
    monkeypatch.setattr("rl_plugins.commands.show.run", lambda arguments: sys.exit(0))
    assert main(["show", "run"]) == 2
    said = "error: code of the user (a reward, a data set) called sys.exit(0), and the command is not finished"
    assert capsys.readouterr().err == f"{said}: remove the call\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exprot"], "there is no command 'exprot'; did you mean 'export'?"),
        (["xyz"], "there is no command 'xyz'; the commands are: doctor,"),
        (["show", "nowhere"], "nowhere is not the folder of a run: it has no metrics.jsonl"),
        (["export", "nowhere", "out"], "nowhere is not a checkpoint of a run"),
        (["generate", "m", "--data", "no.parquet", "--output", "x.parquet"], "no.parquet: there is no such file"),
        (["generate", "m", "--data", "no.parquet", "--output", "x.json"], "--output x.json: must end in .parquet"),
        (["generate", "m", "--data", "d", "--output", "x.parquet", "--top-p", "2"], "argument --top-p: 2: must be"),
        (["generate", "m", "--data", "d", "--output", "x.parquet", "--temperature", "nan"], "nan: must be a finite"),
        (
            ["generate", "m", "--data", "d", "--output", "x.parquet", "--seed", "9" * 20],
            "2**66 or more: must be",
        ),
        (["generate", "m", "--data", "d", "--output", "s3://b/x.parquet"], "path=s3://b/x.parquet: an address"),
        (["export", "checkpoint", "s3://bucket/export"], "give a local path; run.storage of a recipe"),
        (["evaluate", "m", "--data", "d", "--output", "gs://b/x"], "argument --output: path=gs://b/x: "),
        (["generate", "m"], "the following arguments are required: --data, --output; `rl-plugins generate --help`"),
        (
            ["evaluate", "m", "--reward", "gsm8k", "--deadline", "inf"],
            "--deadline: inf: must be a finite number",
        ),
        (["evaluate", "m", "--reward", "gsm8k", "--max-failure-rate", "2"], "2: must be between 0 and 1"),
        (["show", "run", "--samples", "-1"], "argument --samples: -1: must be 0 or more"),
        (["show", "run", "--samples", "all"], "argument --samples: all: must be a whole number; must be 0 or more"),
        (["sync", "run", "--deadline", "nan"], "argument --deadline: nan: must be a finite number; must be above 0"),
        (
            ["generate", "m", "--data", "d", "--output", "x.parquet", "--samples", "2", "--temperature", "0"],
            "--samples 2 with --temperature 0 would all be the same",
        ),
        (["evaluate", "no.parquet", "--reward", "exact_match"], "no.parquet: there is no such file"),
        (["evaluate", "a", "b", "c", "--reward", "exact_match"], "there are 3 inputs"),
        (["evaluate", "policy", "--reward", "exact_match"], "it is a policy: give --data and --output"),
        (
            ["evaluate", "x.parquet", "--reward", "exact"],
            "--reward exact: use one of code_tests, correct_and_format, exact_match",
        ),
        (["evaluate", "x.parquet", "--reward", "none.yaml"], "--reward none.yaml: there is no such file"),
    ],
)
def test_main_names_a_wrong_argument_and_the_correction_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def loaded_by(root, *commands):
    """Run command lines in one process; return the imported heavy libraries, and the printed text."""
    code = (
        "import sys\nfrom rl_plugins.commands.main import main\n"
        f"for command in {commands!r}:\n"
        "    try:\n        main(command.split())\n"
        "    except SystemExit:\n        pass\n"
        "print('LOADED', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=patient(60))
    shown, _, loaded = done.stdout.partition("LOADED")
    assert done.returncode == 0, done.stderr
    return set(loaded.split()) & HEAVY, shown


def test_help_of_a_command_loads_no_heavy_library(root):
    loaded, shown = loaded_by(root, *(f"{name} --help" for name in COMMANDS))
    assert loaded == set()
    # The help of a command is the docstring of the module, with examples.
    assert all(shown.count(f"\n  rl-plugins {name}") >= 2 for name in COMMANDS)


def test_wrong_arguments_and_doctor_load_no_heavy_library(root):
    loaded, shown = loaded_by(
        root,
        "generate m --data no.parquet --output x.parquet",
        "evaluate no.parquet --reward exact_match",
        "show nowhere",
        "doctor",
    )
    assert loaded == set()
    assert "what will work" in shown
