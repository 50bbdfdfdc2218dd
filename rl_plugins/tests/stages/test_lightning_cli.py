"""LightningCLI runs a stage from a YAML file, and the examples of a project without and with RL."""

from __future__ import annotations

import csv
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.preferences import PreferenceDataModule
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows, preference_rows
from rl_plugins.data.sft import SFTDataModule
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.preference_optimization import PreferenceOptimization
from rl_plugins.stages.reward_modeling import RewardModeling
from rl_plugins.stages.sft import SFT

pytest.importorskip("jsonargparse")
from lightning.pytorch.cli import LightningCLI

EXAMPLES = Path(__file__).parents[3] / "examples"
BESIDE_THE_SCRIPT = ("data", "model", "reward")
SCORER = {"_target_": "rl_plugins.rewards.scorers.exact_match"}


@pytest.fixture(autouse=True)
def _only_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the other subcommands out: the parser of a subcommand takes longer than a small training."""
    fit = {"fit": LightningCLI.subcommands()["fit"]}
    monkeypatch.setattr(LightningCLI, "subcommands", staticmethod(lambda: fit))


@pytest.fixture
def _own_modules() -> Iterator[None]:
    """Import the modules beside the script of an example again in each test."""
    yield
    for name in BESIDE_THE_SCRIPT:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_own_modules")
@pytest.mark.parametrize(
    ("project", "trained_on"),
    [
        pytest.param("existing_project", "train_loss", marks=pytest.mark.extended),
        ("existing_project_rl", "train/reward"),
    ],
)
def test_examples_with_lightning_cli_train_their_own_module(
    project: str, trained_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of the model, the reward and the settings of sampling come from the YAML file."""
    write_splits(addition_rows(below=10, num_train=32, num_test=2, seed=0), tmp_path / "data")
    for model in ("tiny", "outputs/sft/model"):
        save_tiny_policy(tmp_path / model)
    script = EXAMPLES / project / "cli.py"
    options = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.accelerator=cpu"]
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", str(script.with_suffix(".yaml")), *options])
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    log = tmp_path / "outputs" / "cli" / "version_0"
    rows = list(csv.DictReader((log / "metrics.csv").read_text().splitlines()))
    assert len([row for row in rows if row[trained_on]]) == 2
    options_of_model = yaml.safe_load(script.with_suffix(".yaml").read_text())["model"]
    own = options_of_model.get("policy", {"init_args": options_of_model})["init_args"]
    # Also the hyperparameters of the module arrive at the logger of the project.
    assert own.items() <= yaml.safe_load((log / "hparams.yaml").read_text()).items()
    if project == "existing_project_rl":
        saved = (log / "config.yaml").read_text()
        assert "scorer: reward.right_answer" in saved and "num_samples: 8" in saved
        # The schedule of the module begins with 0.
        assert [float(row["train/lr"]) for row in rows if row["train/lr"]] == [0.0, own["lr"] / 2]
        assert [row for row in rows if row["val/reward"]]


@pytest.mark.parametrize(
    ("own", "source", "model"),
    [
        (SFT, SFTDataModule, {"policy": "PATH", "scorer": SCORER, "eval_sampling": {"max_tokens": 3}}),
        (
            PreferenceOptimization, PreferenceDataModule,
            {"policy": "PATH", "reference": "PATH", "scorer": SCORER, "eval_sampling": {"max_tokens": 3}},
        ),
        (RewardModeling, PreferenceDataModule, {"model": "PATH"}),
        (
            PolicyOptimization, PromptDataModule,
            {
                "policy": "PATH", "scorer": SCORER["_target_"], "sampling": {"max_tokens": 3, "num_samples": 2},
                "algorithm": {"advantage": "rloo"},
            },
        ),
    ],
    ids=["SFT", "PreferenceOptimization", "RewardModeling", "PolicyOptimization"],
)  # fmt: skip
def test_lightning_cli_runs_a_stage(tmp_path: Path, own: Any, source: Any, model: dict[str, Any]) -> None:
    path = str(save_tiny_policy(tmp_path / "policy"))
    rows = addition_rows(below=10, num_train=8, num_test=1, seed=0)
    write_splits({split: preference_rows(of_split, seed=0) for split, of_split in rows.items()}, tmp_path)
    options: dict[str, Any] = {
        "trainer": {
            "strategy": {"class_path": "rl_plugins.SingleDeviceRolloutStrategy"},
            **{"accelerator": "cpu", "devices": 1, "max_steps": 2, "default_root_dir": str(tmp_path)},
            **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
        },
        "model": {
            **{name: path if value == "PATH" else value for name, value in model.items()},
            "optimizer": {"lr": 0.01},
        },
        "data": {"train": str(tmp_path / "train.parquet"), "tokenizer": path, "prompts_per_step": 4},
    }
    cli = LightningCLI(own, source, args={"subcommand": "fit", "fit": options}, save_config_callback=None)
    assert cli.model.step == 2 and cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.01
