"""The line that a benchmark of an agent prints."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import agent_recipes
from benchmarks.agent_recipes import Series, Setting, measure_agent


def test_measure_agent_returns_metrics_before_and_after_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    series: Series = {
        "val/reward": {0: 0.25, 2: 0.5}, "val/rewards/won": {0: 0.0, 1: 1.0, 2: 0.75}, "time/step": {1: 2.0, 2: 1.0},
    }  # fmt: skip
    given: list[Any] = []

    def train_agent(*values: object, **options: object) -> Series:
        given.append(options)
        return series

    monkeypatch.setattr(agent_recipes, "train_agent", train_agent)
    setting = Setting(seeds=[0], sft_steps=None, grpo_steps=None, is_local=True)
    line = measure_agent("game", {}, 0, setting, {"held-out reward": "reward", "won": "rewards/won"}, ["a=1"])
    assert line == "held-out reward 0.250 -> 0.500, won 0.000 -> 0.750 in 2 steps of 2.00 s, 0 s in all"
    assert given == [{"further": ["a=1"]}]
