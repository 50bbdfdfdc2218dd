"""Recipes on a cluster of several machines: who is where, and what happens when a machine or a process is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration_tests.conftest import Recipe, recipes_in
from integration_tests.machines import Machines, machines
from rl_plugins.run_folder import RunFolder, read_metrics

pytestmark = pytest.mark.extended

SMALL = (
    "batch.prompts_per_step=4", "batch.samples_per_prompt=4", "run.eval_every=0", "tracking.enabled=false",
    "placement.device=cpu", "run.checkpoint_every=1", "optimizer.lr=1e-3",
)  # fmt: skip
# In the project alone, which every node has to unpack, although here they share a host and with it the folder for that.
REWARD = """
import os

def shortness(solution_str):
    assert "my_rewards.py" in os.listdir(os.getcwd())
    return 1.0 - sum(character.isalpha() for character in solution_str) / 8
"""


@pytest.fixture
def three_machines() -> Iterator[Machines]:
    with machines(2, 2, 2) as cluster:
        yield cluster


@pytest.fixture
def on_cluster(three_machines: Machines, workplace: Path, tmp_path: Path) -> Iterator[Callable[..., Recipe]]:
    with recipes_in(tmp_path, workplace, three_machines.address) as start:
        yield start


def test_pools_have_machines_of_their_own_and_are_replaced(
    three_machines: Machines, on_cluster: Callable[..., Recipe], workplace: Path
) -> None:
    run = on_cluster(
        "grpo", "pools", *SMALL, "run.steps=12", "algorithm=on_policy_distillation", f"teacher.path={workplace}/tiny",
        "algorithm.kl.coefficient=0.05", "strategy.name=fsdp", "rollout.engine=transformers",
        "placement.strategy=STRICT_PACK", "placement.teacher.actors=2", "placement.reference.actors=1",
    )  # fmt: skip
    run.wait_for_step(1)
    trainers, actors = three_machines.places_of("RayTrainWorker"), three_machines.places_of("ModelActor")
    assert len(trainers) == 2 and len(actors) == 3
    assert len(set(trainers)) == 1 and not set(trainers) & set(actors)
    (teacher, *_) = three_machines.actors(lambda actor: "-teacher-" in (actor.name or ""))
    os.kill(teacher.pid, signal.SIGKILL)
    assert run.wait() == 0, run.tail()
    series = read_metrics(run.run / "metrics.jsonl")
    assert list(series["train/loss"]) == list(range(1, 13))
    assert series["pool/teacher_restarts"][12] == 1 and series["pool/reference_restarts"][12] == 0
    # The teacher is the policy's start: what the policy has learned is its distance from there.
    assert series["train/kl"][1] == pytest.approx(0, abs=1e-4) and {"time/teacher_log_probs"} <= series.keys()
    said = run.tail(1_000_000)
    for row in ("training workers     2     1     0  STRICT_PACK", "teacher              2     1     0  PACK"):
        assert f"pools: {row}" in said, said
    assert "pools: there is                   6     0  3 in all" in said


def test_a_job_has_its_workers_and_engines_on_three_machines(
    three_machines: Machines, workplace: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "my_rewards.py").write_text(REWARD)
    overrides = (
        "run.name=job", f"run.output_dir={tmp_path}/outputs", f"model.path={workplace}/tiny",
        f"data.train_files=[{workplace}/data/train.parquet]", "data.max_prompt_tokens=26", "sampling.max_tokens=6",
        *SMALL, "run.steps=4", "placement.num_workers=4", "placement.rollout=split", "rollout.engines=2",
        "algorithm.kl.coefficient=0.05", "placement.reference.actors=1", "placement.reference.cpus=0",
        "reward.functions.default._target_=my_rewards.shortness",
    )  # fmt: skip
    log, run = tmp_path / "job.log", RunFolder(tmp_path / "outputs" / "job")
    with log.open("w") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "rl_plugins", "submit", "--address", three_machines.dashboard, "--", "grpo",
             *overrides],
            cwd=project, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    deadline = time.monotonic() + 250
    while run.latest_checkpoint() is None:
        assert job.poll() is None and time.monotonic() < deadline, log.read_text()[:9000]
        time.sleep(0.2)
    trainers, engines = three_machines.places_of("RayTrainWorker"), three_machines.places_of("VLLMActor")
    assert len(trainers) == 4 and len(engines) == 2 and len({*trainers, *engines}) == 3
    # A machine of two CPUs has two of them.
    assert all([*trainers, *engines].count(node) == 2 for node in {*trainers, *engines})
    assert job.wait(120) == 0, log.read_text()[:9000]
    series = read_metrics(run.metrics)
    assert list(series["train/loss"]) == [1, 2, 3, 4]
    assert max(series["train/rollout_gap_max"].values()) < 1e-4
    # The reference is asked under ZeRO-3, too, where models are in shards; the policy moves away from it.
    assert series["train/kl"][1] == pytest.approx(0, abs=1e-4) and series["train/kl"][4] > 1e-4
    assert "job: rollout engines      2     1     0  PACK" in log.read_text()


def test_a_run_outlives_a_machine(workplace: Path, tmp_path: Path) -> None:
    with machines(1, 1, 1) as cluster, recipes_in(tmp_path, workplace, cluster.address) as start:
        run = start(
            "grpo", "lost", *SMALL, "run.steps=40", "rollout.engine=transformers", "placement.strategy=STRICT_SPREAD"
        )
        run.wait_for_step(2)
        before = cluster.places_of("RayTrainWorker")
        assert len(set(before)) == 2
        cluster.kill(before[0])
        assert run.process.poll() is None, "the run had already ended"
        run.wait_for_step(40)
        assert run.wait() == 0, run.tail()
        assert list(read_metrics(run.run / "metrics.jsonl")["train/loss"]) == list(range(1, 41))
        assert "resumed from checkpoint_" in RunFolder(run.run).resumes.read_text()


def test_a_run_ends_when_there_is_no_room_left(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In place of a minute.
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "5")
    with machines(1, 1) as cluster, recipes_in(tmp_path, workplace, cluster.address) as start:
        run = start("grpo", "gone", *SMALL, "run.steps=1000", "rollout.engine=transformers", "placement.max_restarts=1")
        run.wait_for_step(1)
        cluster.kill(cluster.places_of("RayTrainWorker")[0])
        assert run.wait(150) not in (0, 75), run.tail()
        assert "worker group startup timed out" in run.tail().lower(), run.tail()


def test_a_run_waits_for_a_machine_that_comes(workplace: Path, tmp_path: Path) -> None:
    with machines(1) as cluster, recipes_in(tmp_path, workplace, cluster.address) as start:
        small = (*SMALL, "run.steps=1", "rollout.engine=transformers")
        refused = start("grpo", "refused", *small)
        assert refused.wait(60) == 2
        assert "the placement needs 2 CPUs (training workers 2 x 1), the cluster has 1: lower" in refused.tail()
        run = start("grpo", "waiting", *small, "placement.wait_for_nodes_s=200")
        deadline = time.monotonic() + 60
        while "waiting: waiting for 2 x 1 CPUs for the training workers, 1" not in run.tail():
            assert run.process.poll() is None and time.monotonic() < deadline, run.tail()
            time.sleep(0.2)
        assert "of 200 s; free now: 1 CPUs" in run.tail()
        cluster.cluster.add_node(num_cpus=1, object_store_memory=10**8)
        assert run.wait() == 0, run.tail()
