"""Recipes on several machines: the places of roles, and the loss of a machine or a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration_tests.conftest import Recipe, recipes_in
from integration_tests.machines import Machines, machines
from integration_tests.pace import Pace
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tests.patience import patient

pytestmark = pytest.mark.extended

SMALL = (
    "batch.prompts_per_step=4", "batch.samples_per_prompt=4", "run.eval_every=0", "tracking.enabled=false",
    "placement.device=cpu", "run.checkpoint_every=1", "optimizer.lr=1e-3",
)  # fmt: skip
SAMPLES = 16
WAIT_S = patient(60)
WITHOUT_VLLM = "rollout.engine=transformers"
# A folder in the project alone: every node unpacks the project, but here all nodes share a host and its folders.
REWARD = """
import os

from integration_tests.rewards import paced

def shortness(solution_str, pace):
    assert "my_rewards.py" in os.listdir(os.getcwd())
    return paced(solution_str, pace)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Machines]:
    with machines() as cluster:
        yield cluster


@pytest.fixture
def start(cluster: Machines, workplace: Path, tmp_path: Path) -> Iterator[Callable[..., Recipe]]:
    with recipes_in(tmp_path, workplace, cluster.address) as start:
        yield start


def pace_of(tmp_path: Path, *, workers: int) -> Pace:
    """Each training worker has a process for its share of the rewards."""
    return Pace(tmp_path / "pace", samples=SAMPLES // workers)


def steps_of(run: Recipe) -> list[int]:
    return list(read_metrics(run.run / "metrics.jsonl")["train/loss"])


def test_model_pools_have_machines_of_their_own_and_replace_killed_actors(
    cluster: Machines, start: Callable[..., Recipe], workplace: Path, tmp_path: Path
) -> None:
    cluster.resize(2, 2, 2)
    pace = pace_of(tmp_path, workers=2)
    pace.allow(1)
    run = start(
        "grpo", "pools", *SMALL, "run.steps=3", "algorithm=on_policy_distillation", f"teacher.path={workplace}/tiny",
        "algorithm.kl.coefficient=0.05", "strategy.name=fsdp", WITHOUT_VLLM, *pace.overrides,
        "placement.strategy=STRICT_PACK", "placement.teacher.actors=2", "placement.reference.actors=1",
    )  # fmt: skip
    pace.wait(run)
    trainers, actors = cluster.places_of("RayTrainWorker"), cluster.places_of("ModelActor")
    assert len(trainers) == 2 and len(actors) == 3
    assert len(set(trainers)) == 1 and not set(trainers) & set(actors)
    (teacher, *_) = cluster.actors(lambda actor: "-teacher-" in (actor.name or ""))
    os.kill(teacher.pid, signal.SIGKILL)
    pace.allow_all()
    assert run.wait() == 0, run.tail()
    series = read_metrics(run.run / "metrics.jsonl")
    assert list(series["train/loss"]) == [1, 2, 3]
    assert series["pool/teacher_restarts"][3] == 1 and series["pool/reference_restarts"][3] == 0
    # The teacher is the policy's start: its distance from the policy is the policy's progress.
    assert series["train/kl"][1] == pytest.approx(0, abs=1e-4) and {"time/teacher_log_probs"} <= series.keys()
    said = run.tail(1_000_000)
    for row in ("training workers     2     1     0  STRICT_PACK", "teacher              2     1     0  PACK"):
        assert f"pools: {row}" in said, said
    assert "pools: available                  6     0  3 in all" in said


def test_submitted_job_has_workers_and_engines_on_three_machines(
    cluster: Machines, workplace: Path, tmp_path: Path
) -> None:
    cluster.resize(2, 2, 2)
    project = tmp_path / "project"
    project.mkdir()
    (project / "my_rewards.py").write_text(REWARD)
    pace = pace_of(tmp_path, workers=4)
    pace.allow(1)
    overrides = (
        "run.name=job", f"run.output_dir={tmp_path}/outputs", f"model.path={workplace}/tiny",
        f"data.train_files=[{workplace}/data/train.parquet]", "data.max_prompt_tokens=26", "sampling.max_tokens=6",
        *SMALL, "run.steps=4", "placement.num_workers=4", "placement.rollout=split", "rollout.engines=2",
        "algorithm.kl.coefficient=0.05", "placement.reference.actors=1", "placement.reference.cpus=0",
        *pace.overrides, "reward.functions.default._target_=my_rewards.shortness",
    )  # fmt: skip
    log = tmp_path / "job.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_plugins", "submit", "--address", cluster.dashboard, "--", "grpo", *overrides],
            cwd=project, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
    job = Recipe(tmp_path, process, log, "job")
    pace.wait(job)
    trainers, engines = cluster.places_of("RayTrainWorker"), cluster.places_of("VLLMActor")
    assert len(trainers) == 4 and len(engines) == 2 and len({*trainers, *engines}) == 3
    # A machine of two CPUs has two of the workers.
    assert all([*trainers, *engines].count(node) == 2 for node in {*trainers, *engines})
    pace.allow_all()
    assert job.wait() == 0, job.tail()
    series = read_metrics(job.run / "metrics.jsonl")
    assert list(series["train/loss"]) == [1, 2, 3, 4]
    assert max(series["train/rollout_gap_max"].values()) < 1e-4
    # The reference answers under ZeRO-3, too, with sharded models; the policy moves away from the reference.
    assert series["train/kl"][1] == pytest.approx(0, abs=1e-4) and series["train/kl"][4] > 1e-4
    assert "job: rollout engines      2     1     0  PACK" in log.read_text()


def test_run_waits_for_machines_moves_before_an_announced_loss_and_outlives_a_kill(
    cluster: Machines, start: Callable[..., Recipe], tmp_path: Path
) -> None:
    cluster.resize(1)
    refused = start("grpo", "refused", *SMALL, "run.steps=1", WITHOUT_VLLM)
    assert refused.wait() == 2
    assert "the placement needs 2 CPUs (training workers 2 x 1), but the cluster has 1. Lower" in refused.tail()

    pace = pace_of(tmp_path, workers=2)
    pace.allow(2)
    run = start(
        # The run saves at its end and before an announced loss alone.
        "grpo", "moved", *SMALL, "run.checkpoint_every=100000", "run.steps=100000", WITHOUT_VLLM, *pace.overrides,
        f"placement.wait_for_nodes_s={WAIT_S:g}", "placement.strategy=STRICT_SPREAD", "placement.max_restarts=3",
        RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S="0.5",
        # The default is a minute.
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(patient(15)),
    )  # fmt: skip
    run.wait_for_words("moved: waiting for 2 x 1 CPUs for the training workers, 1")
    assert f"of {WAIT_S:g} s; free now: 1 CPUs" in run.tail()
    for _ in range(3):
        cluster.add(1)
    pace.wait(run)
    leaving = cluster.places_of("RayTrainWorker")[0]
    cluster.announce_loss(leaving, in_s=100000)
    # Workers ask for the notice after every step, until the notice arrives.
    pace.allow_all()
    run.wait_for_words(f"moved: Ray is about to lose {leaving}: saving")
    run.wait_until(lambda: RunFolder(run.run).latest_checkpoint() is not None, "the checkpoint")
    cluster.kill(leaving)
    wait_for_resumes(run, 1)
    places = cluster.places_of("RayTrainWorker")
    assert len(set(places)) == 2 and leaving not in places

    cluster.kill(places[0])
    wait_for_resumes(run, 2)
    # Not from the first step: both times from the step of the notice.
    saved = RunFolder(run.run).latest_checkpoint()
    assert saved is not None
    assert all(saved.name in line for line in RunFolder(run.run).resumes.read_text().splitlines())
    cluster.kill(cluster.places_of("RayTrainWorker")[0])
    assert run.wait() == 69, run.tail()
    assert "the cluster had no room for the training workers in time" in run.tail(), run.tail()
    assert steps_of(run) == list(range(1, len(steps_of(run)) + 1))


def wait_for_resumes(run: Recipe, count: int) -> None:
    """Wait until workers have resumed the run so many times, and have taken a step."""
    run.wait_until(lambda: RunFolder(run.run).times_resumed() == count, f"{count} resumes")
    rows = len(run.trained())
    run.wait_until(lambda: len(run.trained()) > rows, "a step after the resume")
