"""A recipe in a separate process: its output, its status, and the libraries not loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_plugins.tests.launch.test_bad_input import GOOD, IN_ONE_PROCESS
from rl_plugins.tests.patience import patient
from rl_plugins.tests.repository.test_import_weight import HEAVY

# Runs one command line after the other in one process, with one import of the command.
COMMANDS = """
import contextlib, io, json, os, sys
from rl_plugins.launch import command_line

policies = []

class Watch:
    "Notes how threads are to wait when something looks for torch, which is not imported by then."
    def find_spec(name, *_):
        if name == "torch":
            policies.append(os.environ.get("OMP_WAIT_POLICY"))

sys.meta_path.insert(0, Watch)
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    policies.clear()
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line.recipe_main("grpo")
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, out.getvalue(), err.getvalue(), [*sys.modules], policies]))
"""
REFUSED = {
    "modl.path=x": "'model.path'",
    "algorithm=grop": "algorithm 'grop'",
    "data.train_files=[a": "key=value",
    "model.path=???": "model.path",
    "run.steps=0": "run.steps=0",
    "model.path=./missing": "no such folder",
    "data.train_files=[bad_row.parquet]": "row 1",
}
CHANGED = ["batch.prompts_per_step=7", "algorithm=rloo", "--config-name", "quickstart_grpo"]


@dataclass
class Outcome:
    """End of a command line.

    Attributes:
        status: status of the process.
        out: standard output.
        err: standard error.
        modules: modules loaded at the end.
        policies: values of OMP_WAIT_POLICY at each search for torch before the import of torch.
    """

    status: int
    out: str
    err: str
    modules: list[str]
    policies: list[str | None]

    @property
    def loaded(self) -> set[str]:
        """Return the loaded heavy libraries."""
        return set(self.modules) & HEAVY


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    variables = {"RAY_ADDRESS", "OMP_WAIT_POLICY"}
    environment = {key: value for key, value in os.environ.items() if key not in variables}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=patient(60))


def outcomes(command_lines: list[list[str]], cwd: Path) -> list[Outcome]:
    """Run command lines of the GRPO recipe in one process."""
    done = python("-c", COMMANDS, json.dumps(command_lines), cwd=cwd)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def answered(workplace: Path) -> dict[str, Outcome]:
    """Outcomes, by name, of the command lines with an early end: by an error or a question."""
    command_lines = {
        "help": ["--help"],
        "job": ["--cfg", "job", "--config-name", "gsm8k_grpo"],
        "difference": ["--cfg", "diff", *CHANGED],
        "no difference": ["--cfg=diff"],
        "difference of what is unknown": ["--cfg", "diff", "batch.promts_per_step=7"],
        "unknown recipe": ["--config-name", "grop"],
        **{override: [*GOOD, override] for override in REFUSED},
    }
    return dict(zip(command_lines, outcomes([*command_lines.values()], workplace), strict=True))


def test_grpo_module_ends_with_one_line_of_error_and_status_2(workplace):
    outcome = python("-m", "rl_plugins.recipes.grpo", *GOOD, "modl.path=x", cwd=workplace)
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("error: ") and outcome.stderr.count("\n") == 1
    assert "'model.path'" in outcome.stderr


def test_recipe_main_ends_with_one_line_of_error_and_status_2(answered):
    for override, expected in REFUSED.items():
        outcome = answered[override]
        assert outcome.status == 2 and outcome.out == "", (override, outcome.status, outcome.out)
        assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1, (override, outcome.err)
        assert expected in outcome.err, (override, outcome.err)


def test_recipe_main_names_the_recipes_that_there_are(answered):
    outcome = answered["unknown recipe"]
    assert outcome.status == 2 and outcome.err.startswith("error: ") and outcome.err.count("\n") == 1
    assert "recipe 'grop'" in outcome.err and "gsm8k_grpo" in outcome.err


def test_help_and_cfg_job_show_the_options(answered):
    for flag in ("help", "job"):
        assert answered[flag].status == 0, answered[flag].err
        assert "prompts_per_step: " in answered[flag].out
    assert "name: gsm8k_grpo" in answered["job"].out


def test_cfg_diff_shows_the_options_that_differ_from_the_recipe(answered):
    lines = answered["difference"].out.splitlines()
    assert "batch.prompts_per_step: 7  # recipe: 64" in lines
    assert "algorithm.advantage: rloo  # recipe: grpo" in lines
    assert "algorithm.policy_loss_options.clip_low: (none)  # recipe: 0.2" in lines
    assert not any(line.startswith(("run.", "data.")) for line in lines)
    assert answered["no difference"].out == "nothing differs from the recipe\n"
    refused = answered["difference of what is unknown"]
    assert refused.status == 2 and "batch.prompts_per_step" in refused.err


def test_recipe_main_loads_no_heavy_library_before_the_checks(answered):
    for name, outcome in answered.items():
        assert outcome.loaded == set(), name
    assert "rl_plugins.launch.preflight" in answered["data.train_files=[bad_row.parquet]"].modules


def test_preflight_loads_no_heavy_library_but_transformers_and_torch(workplace):
    prompts, algorithm = outcomes(
        [
            [*GOOD, "data.max_prompt_tokens=2"],
            [*GOOD, *IN_ONE_PROCESS, "algorithm.policy_loss_options.dual_clip=1"],
        ],
        workplace,
    )
    assert prompts.status == 2 and "max_prompt_tokens" in prompts.err
    assert prompts.loaded <= {"transformers"}
    assert algorithm.status == 2 and "dual_clip" in algorithm.err
    assert algorithm.loaded <= {"transformers", "torch"}
    # Threads of one process are told to wait before torch is there.
    assert set(algorithm.policies) == {"PASSIVE"}
