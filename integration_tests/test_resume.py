"""A run that is killed and stopped again and again ends with the same bits as one that is left alone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.conftest import Recipe

pytestmark = pytest.mark.extended

COMMON = (
    "run.steps=12",
    "run.checkpoint_every=3",
    "run.eval_every=0",
    "run.deterministic=true",
    "batch.prompts_per_step=8",
    "batch.samples_per_prompt=4",
    "batch.updates_per_step=2",
    "optimizer.lr=1e-3",
    "optimizer.warmup_steps=4",
    "algorithm.kl.coefficient=0.05",
    "algorithm.kl.target=0.01",
    "tracking.experiment=resume",
    # A score that many samples get, so that the weights really move.
    "reward.functions.default={_target_: integration_tests.rewards.shortness}",
)
SAME = ("train/reward", "train/loss", "train/kl", "train/kl_coefficient", "train/gradient_norm", "train/lr")


# Two runs, one of which is started three times.
@pytest.mark.timeout(1800)
def test_interrupted_run_equals_uninterrupted(start_recipe: Callable[..., Recipe]) -> None:
    whole = start_recipe("grpo", "whole", *COMMON)
    assert whole.wait() == 0, whole.tail()

    broken = start_recipe("grpo", "broken", *COMMON)
    broken.wait_for_step(4)
    broken.kill_one("RayTrainWorker")  # Ray Train starts the workers again, from step 3
    broken.wait_for_step(5)
    broken.wait_for_step(6)
    said = " ".join(broken.log.read_text().split())
    assert re.search(
        r"broken: training worker \d failed \(.+\): the workers start again from checkpoint_0000000\d,", said
    )
    assert "restart 1 of 2" in (broken.run / "failures.txt").read_text()
    broken.kill()  # the driver and everything with it
    assert not list(broken.run.glob("policy")), "the run had already ended"

    resumed = start_recipe("grpo", "broken", *COMMON, "run.resume=true")
    resumed.wait_for_step(7)
    resumed.kill_one("VLLMActor")  # the engine: the step waits for a new one
    resumed.process.terminate()  # what Slurm and Kubernetes do: the workers save this step and end
    assert resumed.wait() == 75, resumed.tail()
    assert ": SIGTERM; the same command with run.resume=true goes on" in resumed.log.read_text()
    # The metrics may have later steps, from before the engine was lost.
    stopped_after = int((resumed.run / "stopped.txt").read_text().removeprefix("after step ").split(":")[0])
    assert 7 <= stopped_after < 12 and (resumed.run / f"checkpoint_{stopped_after:08d}").is_dir()
    assert not list(resumed.run.glob("policy"))

    # Somebody makes room; Ray Train, which knew of the checkpoint, does not miss it.
    shutil.rmtree(min(resumed.run.glob("checkpoint_0*")))
    resumed = start_recipe("grpo", "broken", *COMMON, "run.resume=true")
    assert resumed.wait() == 0, resumed.tail()
    assert f"resumed from checkpoint_{stopped_after:08d}" in resumed.log.read_text()

    assert len(list(resumed.run.glob("checkpoint_0*"))) == len(list(whole.run.glob("checkpoint_0*"))) == 2
    assert weights(resumed.run) == weights(whole.run)
    first, second = last_by_step(whole.metrics()), last_by_step(resumed.metrics())
    for step in range(1, 13):
        for name in SAME:
            assert first[step][name] == second[step][name], (step, name)
    assert (whole.run / "mlflow_run_id").read_text() != (resumed.run / "mlflow_run_id").read_text()
    assert mlflow_runs(resumed.folder) == 2, "a resumed run continues its MLflow run"


def weights(run: Path) -> bytes:
    return (run / "policy" / "model.safetensors").read_bytes()


def last_by_step(rows: list[dict[str, float]]) -> dict[int, dict[str, float]]:
    return {int(row["step"]): row for row in rows if "train/loss" in row}


def mlflow_runs(folder: Path) -> int:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    experiment = client.get_experiment_by_name("resume")
    assert experiment is not None
    return len(client.search_runs([experiment.experiment_id]))
