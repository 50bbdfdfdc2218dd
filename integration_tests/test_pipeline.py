"""SFT, reward model, PPO in one command: a stage starts from the stage before; all stages are in one MLflow run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from integration_tests.command_server import run_command
from integration_tests.conftest import RUN_DEADLINE_S
from rl_plugins.commands.export import export_checkpoint
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows, preference_rows
from rl_plugins.run_folder import read_metrics

pytestmark = pytest.mark.extended

STAGES = ("sft", "reward_model", "ppo")


def run(folder: Path, workplace: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "rl_plugins.recipes.sft_rm_ppo", f"model={workplace}/tiny", f"output_dir={folder}",
        f"data.sft=[{folder}/train.parquet]", f"data.pairs=[{folder}/train_pairs.parquet]",
        f"data.prompts=[{folder}/train.parquet]", f"data.val=[{folder}/test.parquet]",
        f"data.val_pairs=[{folder}/test_pairs.parquet]", "++common.sampling.max_tokens=4",
        "++common.data.max_prompt_tokens=28", "++common.batch.prompts_per_step=16", "++common.run.steps=2",
        "++common.run.eval_every=1", "++stages.ppo.options.batch.samples_per_prompt=4",
        "++stages.ppo.options.critic.warmup_steps=1", "++stages.ppo.options.placement.num_workers=1",
        # Only the last stage needs the cluster and the engine here; the start of each takes time.
        *(
            f"++stages.{stage}.options.{option}"
            for stage in ("sft", "reward_model")
            for option in ("launcher=local", "rollout.engine=transformers")
        ),
        *overrides,
    ]  # fmt: skip
    return run_command(command, cwd=folder, timeout_s=RUN_DEADLINE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    splits = addition_rows(below=50, num_train=64, num_test=16, seed=0)
    write_splits(splits | {f"{name}_pairs": preference_rows(rows, seed=0) for name, rows in splits.items()}, folder)
    return folder


def test_wrong_option_of_the_last_stage_is_found_before_the_first_stage(folder: Path, workplace: Path) -> None:
    result = run(folder, workplace, "++stages.ppo.options.batch.updates_per_step=5", "name=refused")
    assert result.returncode == 2
    assert "stage ppo: batch.updates_per_step=5 does not divide the 16 prompts" in result.stderr
    assert not (folder / "refused").exists()


def test_pipeline_trains_three_stages_under_one_mlflow_run_and_resumes(folder: Path, workplace: Path) -> None:
    result = run(folder, workplace)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    pipeline = folder / "sft_rm_ppo"
    for stage, exported in zip(STAGES, ("policy", "reward_model", "policy"), strict=True):
        assert (pipeline / stage / exported / "model.safetensors").is_file()
    # A checkpoint of the reward model is exported with the run's export.
    (checkpoint,) = (pipeline / "reward_model").glob("checkpoint_*")
    export_checkpoint(checkpoint, folder / "exported")
    weights, own = (
        load_file(path / "model.safetensors") for path in (folder / "exported", pipeline / "reward_model/reward_model")
    )
    assert weights.keys() == own.keys() and all(torch.equal(weights[name], own[name]) for name in own)
    ppo = read_metrics(pipeline / "ppo" / "metrics.jsonl")
    # The policy waits for the critic in the first step. Rules only validate: a trained reward is not 0 or 1.
    assert list(ppo["train/critic/loss"]) == [1, 2] and list(ppo["train/loss"]) == [2]
    assert all(reward not in (0.0, 1.0) for reward in ppo["train/reward"].values()) and ppo["val/reward"]
    client = MlflowClient(f"sqlite:///{pipeline}/mlflow.db")
    parent = (pipeline / "mlflow_run_id").read_text()
    (experiment,) = (one for one in client.search_experiments() if one.name == "rl_plugins")
    runs = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"sft_rm_ppo", *STAGES}
    assert all(runs[stage].data.tags["mlflow.parentRunId"] == parent for stage in STAGES)
    assert all(one.info.status == "FINISHED" for one in runs.values())
    assert {"sft/val/reward", "reward_model/val/accuracy", "ppo/val/reward"} <= set(runs["sft_rm_ppo"].data.metrics)
    # Second run: existing files change only on request, and complete stages do not run again.
    again = run(folder, workplace)
    assert again.returncode == 2 and "exists: continue it with resume=true" in again.stderr
    resumed = run(folder, workplace, "resume=true")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert resumed.stdout.count("complete, see") == 3
