"""The agent recipes: both stages train in one process on the rows of `rl-plugins prepare`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from benchmarks.agent_recipes import Series, Setting, before_and_after, train_agent
from rl_plugins.data.prepare.calculator import calculator_splits
from rl_plugins.data.prepare.game import game_splits
from rl_plugins.data.prepare.programs import program_splits
from rl_plugins.data.prepare.tasks import MakeSplits
from rl_plugins.launch import local  # noqa: F401
from rl_plugins.tests.patience import patient
from rl_plugins.tests.sandbox.machine import skip_without_namespaces
from rl_plugins.tests.tiers import tiered

SETTING = Setting(seeds=[0], sft_steps=2, grpo_steps=2, is_local=True)
SIZES = {"train": 8, "dev": 2, "test": 2}
SMALL = (
    "batch.prompts_per_step=4", "batch.samples_per_prompt=2", "run.eval_every=2", "run.target_reward=null",
    "placement.device=cpu", f"reward.load_timeout_s={patient(60)}", f"reward.deadline_s={patient(60)}",
)  # fmt: skip
SLOW = {
    "calculator": [f"environment.deadline_s={patient(60)}"],
    "game": [f"environment.deadline_s={patient(60)}"],
    "programs": ["reward.functions.default.limits.wall_s=30", "reward.functions.default.total_s=50"],
}
"""Deadlines that a busy machine keeps."""


@dataclass(frozen=True)
class Agent:
    """An agent recipe.

    Attributes:
        name: name of the recipe.
        make_splits: function that makes the rows.
        metrics: names of the recipe's own metrics of validation.
    """

    name: str
    make_splits: MakeSplits
    metrics: list[str] = field(default_factory=list)


AGENTS = {
    "calculator": Agent("calculator", calculator_splits),
    "game": Agent("game", game_splits, metrics=["won", "guesses"]),
    "programs": Agent("programs", program_splits, metrics=["passed", "no_program", "errors"]),
}


@pytest.fixture(scope="module", params=tiered(AGENTS, {"game"}))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Series]]:
    """An agent recipe, and the metrics of its GRPO stage."""
    agent = AGENTS[request.param]
    if agent.name == "programs":
        skip_without_namespaces()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        # The tested functions set these variables for their process.
        for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}.items():
            patch.setenv(name, value)
        further = [*SMALL, *SLOW[agent.name]]
        splits = agent.make_splits(SIZES, 0)
        folder = tmp_path_factory.mktemp(agent.name)
        yield agent, train_agent(agent.name, splits, folder, 0, SETTING, further=further)


def test_both_stages_of_an_agent_recipe_train(trained: tuple[Agent, Series]) -> None:
    agent, series = trained
    assert list(series["train/loss"]) == [1, 2] and list(series["val/reward"]) == [0, 2]
    assert max(series["train/rollout_gap_max"].values()) < 1e-4
    for metric in agent.metrics:
        assert " -> " in before_and_after(series, f"rewards/{metric}")
    failures = [f"train/reward_{kind}" for kind in ("raised", "timeout", "died", "memory", "not_finite")]
    assert {name: count for name in failures if (count := sum(series[name].values()))} == {}
