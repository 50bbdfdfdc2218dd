"""A run with an engine of its own for the judge: the run outlives the end of the engine's server."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.conftest import recipes_in
from rl_plugins.tests.patience import is_running

pytestmark = pytest.mark.extended

SERVER = "rl_plugins.rewards.judge_engine"
"""Words in the title of the server's process."""


def test_run_starts_an_engine_for_the_judge_and_waits_for_a_killed_server(workplace: Path, tmp_path: Path) -> None:
    with recipes_in(tmp_path, workplace) as start:
        run = start(
            "grpo", "judged", "reward=judge", "placement.judge.actors=1", "placement.judge.cpus=0.5",
            f"reward.judge.model={workplace / 'tiny'}", "reward.judge.response_format=none",
            "reward.judge.temperature=1", "reward.judge.max_tokens=16", "reward.judge.template='Judge {response}'",
            "++reward.judge.request={structured_outputs: {regex: 'Score: [0-9]'}}", "run.steps=6",
            "run.eval_every=0", "run.export=false", "tracking.enabled=false", "batch.prompts_per_step=4",
            "batch.samples_per_prompt=2", "placement.device=cpu", "placement.cpus_per_worker=0.5",
            "rollout.engine=transformers",
        )  # fmt: skip
        run.wait_for_step(1)
        first = run.processes(SERVER)
        run.kill_one(SERVER)
        run.wait_until(lambda: not {*run.processes(SERVER)} <= {*first}, "another server of the judge")
        servers = [*first, *run.processes(SERVER)]
        assert run.wait() == 0, run.tail()
    assert not any(is_running(server.pid) for server in servers)
    rows = run.trained()
    assert len(rows) == 6 and all(row["train/judge/calls"] == 8 for row in rows)
    assert all(row["train/reward_raised"] == row["train/reward_timeout"] == 0 for row in rows)
    assert "the judge engine was ended by the signal SIGKILL, and starts again" in run.tail(1_000_000)
