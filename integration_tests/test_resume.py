"""A run that is killed and stopped again and again ends with the same bits as an uninterrupted run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.campaign import KINDS, differences
from integration_tests.conftest import Recipe
from integration_tests.pace import Pace

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
)
SAME = ("train/reward", "train/loss", "train/kl", "train/kl_coefficient", "train/gradient_norm", "train/lr")


def test_run_that_loses_processes_of_four_kinds_and_is_resumed_equals_an_uninterrupted_run(
    start_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    # Each of two workers has a process for its half of the rewards. A new process counts from 0.
    pace = Pace(tmp_path / "pace", samples=16)
    whole = start_recipe("grpo", "whole", *COMMON, *Pace(tmp_path / "none", samples=16).overrides)

    pace.allow(2)
    broken = start_recipe("grpo", "broken", *COMMON, *pace.overrides)
    pace.wait(broken)
    lose(broken, "reward worker")  # a new process scores the samples again
    pace.allow(4)
    pace.wait(broken)
    lose(broken, "training worker")  # Ray Train starts the workers again, from step 3
    pace.allow(3)
    pace.wait(broken)
    said = " ".join(broken.log.read_text().split())
    assert re.search(
        r"broken: training worker \d failed \(.+\)\. The workers start again, restart 1 of 2; the newest checkpoint is "
        r"checkpoint_00000003\.",
        said,
    )
    assert re.search(r"broken: continuing from \S+/checkpoint_00000003 ", said)
    assert "restart 1 of 2" in (broken.run / "failures.txt").read_text()
    broken.kill()  # the driver and all its processes
    assert broken.trained()[-1]["step"] == 6 and not list(broken.run.glob("policy"))

    pace.allow(2)
    resumed = start_recipe("grpo", "broken", *COMMON, *pace.overrides, "run.resume=true", new_interpreter=True)
    pace.wait(resumed)
    lose(resumed, "engine")  # step 10 waits for a new engine
    pace.allow(4)
    pace.wait(resumed)
    resumed.process.terminate()  # as Slurm and Kubernetes do: the workers save this step and end
    resumed.wait_until((resumed.run / "stop").is_file, "the end of the signal's handler")
    pace.allow_all()
    assert resumed.wait() == 75, resumed.tail()
    assert ": SIGTERM. To continue, repeat the command with run.resume=auto" in resumed.log.read_text()
    assert (resumed.run / "stopped.txt").read_text().startswith("after step 11:")
    assert (resumed.run / "checkpoint_00000011").is_dir()
    assert not list(resumed.run.glob("policy"))

    # A user deletes a checkpoint. Ray Train had recorded this checkpoint, and goes on without.
    shutil.rmtree(min(resumed.run.glob("checkpoint_0*")))
    resumed = start_recipe("grpo", "broken", *COMMON, *pace.overrides, "run.resume=true")
    assert resumed.wait() == 0, resumed.tail()
    assert "resumed from checkpoint_00000011" in resumed.log.read_text()

    assert whole.wait() == 0, whole.tail()
    assert len(list(resumed.run.glob("checkpoint_0*"))) == len(list(whole.run.glob("checkpoint_0*"))) == 2
    assert weights(resumed.run) == weights(whole.run)
    first, second = last_by_step(whole.metrics()), last_by_step(resumed.metrics())
    for step in range(1, 13):
        for name in SAME:
            assert first[step][name] == second[step][name], (step, name)
    assert (whole.run / "mlflow_run_id").read_text() != (resumed.run / "mlflow_run_id").read_text()
    assert mlflow_runs(resumed.folder) == 2, "a resumed run continues its MLflow run"


def test_run_that_ends_with_controller_raylet_or_head_is_resumed_with_the_same_bits(
    start_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    options = (
        *COMMON, "rollout.engine=transformers", "placement.num_workers=1",
        "run.checkpoint_every=1", "run.steps=7", "run.resume=auto", "tracking.enabled=false",
    )  # fmt: skip
    whole = start_recipe("grpo", "whole", *options, *Pace(tmp_path / "none", samples=32).overrides)
    assert whole.wait() == 0, whole.tail()
    pace = Pace(tmp_path / "pace", samples=32)
    pace.allow(2)
    for kind in ("controller", "raylet", "head"):
        # In each start the run takes two steps and waits, so the run notices the loss before its end.
        broken = start_recipe("grpo", "broken", *options, *pace.overrides)
        pace.wait(broken)
        pace.file.with_suffix(".held").unlink()
        lose(broken, kind)
        assert broken.wait() != 0, broken.tail()
    pace.allow_all()
    last = start_recipe("grpo", "broken", *options, *pace.overrides)
    assert last.wait() == 0, last.tail()
    assert "resumed from checkpoint_00000006" in last.log.read_text()
    assert differences(last.run, whole.run) == []
    trained = last.trained()
    again = start_recipe("grpo", "broken", *options, *pace.overrides)
    assert again.wait() == 0, again.tail()
    assert "broken: the run is finished: step 7 was its last" in again.log.read_text()
    assert again.trained() == trained and differences(again.run, whole.run) == []


def lose(run: Recipe, kind: str) -> None:
    KINDS[kind].find(run)[0].kill()


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
