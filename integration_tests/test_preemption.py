"""Ray's notice that a machine will be taken away: the step is saved before that, and the run goes on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.conftest import recipes_in
from integration_tests.machines import machines
from rl_plugins.run_folder import RunFolder, read_metrics

pytestmark = pytest.mark.extended

STEPS = 200


def test_a_run_moves_from_a_machine_that_will_be_taken_away(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In place of every five seconds.
    monkeypatch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
    with machines(1, 1, 1) as cluster, recipes_in(tmp_path, workplace, cluster.address) as start:
        run = start(
            "grpo", "moved", "batch.prompts_per_step=4", "batch.samples_per_prompt=4", "run.eval_every=0",
            "tracking.enabled=false", "placement.device=cpu", "optimizer.lr=1e-3", f"run.steps={STEPS}",
            # It would save at its end alone.
            "run.checkpoint_every=1000", "rollout.engine=transformers", "placement.strategy=STRICT_SPREAD",
        )  # fmt: skip
        run.wait_for_step(2)
        leaving = cluster.places_of("RayTrainWorker")[0]
        cluster.announce_loss(leaving, in_s=8)
        run.wait_for_step(STEPS)
        assert run.wait() == 0, run.tail()
        assert leaving not in cluster.places_of("RayTrainWorker")
    said = run.tail(1_000_000)
    assert f"moved: Ray is about to lose {leaving}: saving" in said, said
    assert list(read_metrics(run.run / "metrics.jsonl")["train/loss"]) == list(range(1, STEPS + 1))
    # Not from its beginning: from the step at which the notice came.
    assert "resumed from checkpoint_" in RunFolder(run.run).resumes.read_text()
