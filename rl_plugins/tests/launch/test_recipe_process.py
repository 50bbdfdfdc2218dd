"""A recipe as a process of its own: what it prints, how it ends, and what it has not loaded by then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_plugins.tests.launch.test_bad_input import GOOD

GRPO = ["-m", "rl_plugins.recipes.grpo"]


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


WATCHED = """
import os, sys
from rl_plugins.launch import command_line, local

class Watch:
    def find_spec(name, *_):
        if name == "torch":
            print("threads are", os.environ.get("OMP_WAIT_POLICY"))

sys.meta_path.insert(0, Watch)
local.train = lambda *_: None
command_line.recipe_main("grpo")
"""


def test_threads_of_one_process_are_told_to_wait_before_torch_is_there(workplace, tmp_path):
    options = [*GOOD, "launcher=local", "rollout.engine=transformers", f"run.output_dir={tmp_path}"]
    outcome = python("-c", WATCHED, *options, cwd=workplace)
    assert outcome.returncode == 0, outcome.stderr
    assert "threads are PASSIVE" in outcome.stdout and "threads are None" not in outcome.stdout


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["modl.path=x"], "'model.path'"),
        (["model.path=???"], "model.path"),
        (["data.train_files=[bad_row.parquet]"], "row 1"),
    ],
)
def test_as_a_user_meets_it(overrides, expected, workplace):
    start = time.monotonic()
    outcome = python(*GRPO, *GOOD, *overrides, cwd=workplace)
    assert time.monotonic() - start < 15
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("error: ") and outcome.stderr.count("\n") == 1
    assert expected in outcome.stderr


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job", "--config-name", "gsm8k_grpo"]])
def test_asking_starts_nothing(flags, workplace):
    outcome = python(*GRPO, *flags, cwd=workplace)
    assert outcome.returncode == 0, outcome.stderr
    assert "prompts_per_step: " in outcome.stdout
    if "gsm8k_grpo" in flags:
        assert "name: gsm8k_grpo" in outcome.stdout


def test_what_differs_from_a_recipe(workplace):
    overrides = ["batch.prompts_per_step=7", "algorithm=rloo", "--config-name", "quickstart_grpo"]
    lines = python(*GRPO, "--cfg", "diff", *overrides, cwd=workplace).stdout.splitlines()
    assert "batch.prompts_per_step: 7  # recipe: 64" in lines
    assert "algorithm.advantage: rloo  # recipe: grpo" in lines
    assert "algorithm.policy_loss_options.clip_low: (none)  # recipe: 0.2" in lines
    assert not any(line.startswith(("run.", "data.")) for line in lines)
    assert python(*GRPO, "--cfg=diff", cwd=workplace).stdout == "nothing differs from the recipe\n"
    refused = python(*GRPO, "--cfg", "diff", "batch.promts_per_step=7", cwd=workplace)
    assert refused.returncode == 2 and "batch.prompts_per_step" in refused.stderr


LOADED_BY = """
import sys
from rl_plugins.launch.command_line import recipe_main
try:
    recipe_main("grpo")
except SystemExit:
    print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("override", "forbidden"),
    [
        ("data.max_prompt_tokens=2", {"torch"}),
        ("algorithm.policy_loss_options.dual_clip=1", set()),
    ],
)
def test_nothing_heavy_is_loaded_before_the_checks_have_passed(override, forbidden, workplace):
    outcome = python("-c", LOADED_BY, *GOOD, override, cwd=workplace)
    assert override.partition("=")[0].split(".")[-1] in outcome.stderr
    loaded = set(outcome.stdout.split())
    assert "rl_plugins.launch.preflight" in loaded
    assert loaded & ({"deepspeed", "lightning", "mlflow", "ray", "vllm"} | forbidden) == set()
