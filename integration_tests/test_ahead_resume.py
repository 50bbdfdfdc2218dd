"""A run that samples ahead is killed and resumed: each prompt is trained on once, in its own step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.conftest import Recipe
from integration_tests.pace import Pace
from rl_plugins.data.experience import Experience
from rl_plugins.rewards.trajectory import RECORDS
from rl_plugins.stages.scheduled_sampler import row_of

pytestmark = pytest.mark.extended

STEPS, PROMPTS, SAMPLES = 14, 8, 4
COMMON = (
    f"run.steps={STEPS}",
    "run.checkpoint_every=3",
    "run.eval_every=0",
    "run.export=false",
    f"batch.prompts_per_step={PROMPTS}",
    f"batch.samples_per_prompt={SAMPLES}",
    "schedule.max_staleness=2",
    f"debug.dump_rollouts={STEPS}",
    "tracking.enabled=false",
)


def test_resumed_run_that_samples_ahead_trains_on_each_group_once(
    start_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    # Each of two workers has a process for its half of the rewards. This process cannot score the last steps.
    pace = Pace(tmp_path / "pace", samples=PROMPTS * SAMPLES // 2)
    pace.allow(10)
    run = start_recipe("grpo", "ahead", *COMMON, *pace.overrides)
    run.wait_for_step(8)
    run.kill()
    pace.allow_all()
    resumed = start_recipe("grpo", "ahead", *COMMON, *pace.overrides, "run.resume=true")
    assert resumed.wait() == 0, resumed.tail()
    line = (resumed.run / "resumes.txt").read_text()
    # Groups for two steps, for each of two workers.
    assert f"{2 * PROMPTS // 2} groups of each worker's queue, " in line

    batches: dict[int, set[int]] = {}
    numbers: list[int] = []
    for step in range(1, STEPS + 1):
        files = sorted((resumed.run / "rollouts" / f"step_{step:08d}").glob("draw_0_rank_*"))
        assert len(files) == 2
        for file in files:
            groups = Experience.load(file, RECORDS).groups[::SAMPLES].tolist()
            numbers += groups
            batches.setdefault(step, set()).update(number // 2**32 for number in groups)
    assert len(numbers) == len(set(numbers)) == STEPS * PROMPTS
    # The data has more rows: no row came twice.
    assert len({row_of(number) for number in numbers}) == STEPS * PROMPTS
    assert batches == {step: {step - 1} for step in batches}

    rows = {int(row["step"]): row for row in resumed.metrics() if "train/loss" in row}
    assert [rows[step]["rollout/staleness_max"] for step in (1, 2, 3)] == [0, 1, 2]
    assert max(row["rollout/staleness_max"] for row in rows.values()) == 2
