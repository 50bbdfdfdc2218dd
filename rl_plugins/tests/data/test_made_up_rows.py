"""Made-up rows of the agent recipes: different rows in each split, programs with their tests, and the commands."""

from __future__ import annotations

import json
import random
import shlex

import pytest

from rl_plugins.data.parquet import load_rows
from rl_plugins.data.prepare.calculator import calculator_splits
from rl_plugins.data.prepare.programs import CONSTANTS, SLOPES, TESTED, program_splits
from rl_plugins.data.prepare.splits import choose_splits
from rl_plugins.errors import ConfigError
from rl_plugins.launch.compose import compose_config
from rl_plugins.rewards.code_tests import program_of, read_tests
from rl_plugins.tests.data.prepare_command import main

SIZES = {"train": 6, "dev": 2, "test": 3}


def test_choose_splits_takes_no_item_twice() -> None:
    splits = choose_splits(range(11), random.Random(0), SIZES)
    assert sorted(item for items in splits.values() for item in items) == [*range(11)]
    assert {split: len(items) for split, items in splits.items()} == {"train": 6, "dev": 2, "test": 3}


def test_choose_splits_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"11 rows .* \(6 train, 2 dev, 3 test\), but .* only 10 different"):
        choose_splits(range(10), random.Random(0), SIZES)
    with pytest.raises(ConfigError, match="num_dev=0: must be 1 or more"):
        choose_splits(range(11), random.Random(0), {**SIZES, "dev": 0})


def test_calculator_splits_have_products_of_five_digits() -> None:
    splits = calculator_splits({"train": 200, "dev": 20, "test": 20}, seed=0)
    rows = [row for split in ("train", "dev", "test") for row in splits[split]]
    assert {len(row["reward_model"]["ground_truth"]) for row in rows} == {5}
    assert len(splits["sft"]) == 400


def test_program_splits_have_programs_that_alone_pass_both_tests() -> None:
    splits = program_splits(SIZES, seed=0)
    rows = [row for split in ("train", "dev", "test") for row in splits[split]]
    assert len({row["prompt"][0]["content"] for row in rows}) == 11 and splits["sft"] == splits["train"]
    assert splits == program_splits(SIZES, seed=0) and splits != program_splits(SIZES, seed=1)
    for row in rows:
        tests = json.loads(row["reward_model"]["ground_truth"])
        assert len(read_tests(row["reward_model"]["ground_truth"], row["extra_info"])) == 2
        names: dict[str, object] = {}
        exec(program_of(row["extra_info"]["response"]) or "", names)
        f = names[tests["fn_name"]]
        assert callable(f) and [f(*arguments) for arguments in tests["inputs"]] == tests["outputs"]
        assert row["prompt"][0]["content"] == f"f(0)={f(0)} f(1)={f(1)}"
        passing = [
            (slope, constant)
            for slope in SLOPES
            for constant in CONSTANTS
            if [slope * x + constant for x in TESTED] == tests["outputs"]
        ]
        assert len(passing) == 1


@pytest.mark.parametrize("name", ["calculator", "game", "programs"])
def test_prepare_prints_the_commands_of_an_agent_recipe(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--num-train", "6", "--num-dev", "2", "--num-test", "3", "--seed", "1"]
    assert main([name, "--output", f"data/{name}", *sizes]) == 0
    assert len(load_rows([tmp_path / "data" / name / f"{split}.parquet" for split in ("train", "dev", "test")])) == 11
    *_, sft, grpo = (shlex.split(line) for line in capsys.readouterr().out.splitlines())
    files = {"sft": ("sft", "dev"), "grpo": ("train", "test")}
    models = {"sft": "MODEL", "grpo": f"outputs/{name}_sft/policy"}
    for stage, (program, option, module, flag, config_name, *options) in {"sft": sft, "grpo": grpo}.items():
        assert (program, option, module, flag) == ("python", "-m", f"rl_plugins.recipes.{stage}", "--config-name")
        config = compose_config(config_name, options)
        train, held_out = (f"data/{name}/{split}.parquet" for split in files[stage])
        assert (config.data.train_files, config.data.val_files) == ([train], [held_out])
        assert (config.run.name, config.model.path) == (f"{name}_{stage}", models[stage])
        assert all((tmp_path / file).is_file() for file in (train, held_out))
    assert main([name, "--output", "data/more", "--num-train", "1000000"]) == 2
