"""The trial of a stateful environment before a run: an object starts and answers a response for each data source."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.environments.object_host import ObjectHost
from rl_plugins.launch.task_environment import try_environment
from rl_plugins.models.tiny import build_tokenizer
from rl_plugins.tests.launch.configurations import configured

ENVIRONMENTS = "rl_plugins.tests.environments.sample_environments"


def test_trial_closes_the_object_of_a_source_before_the_object_of_the_next_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The object answers with a message, so the conversation goes on after the trial."""
    in_use: set[int] = set()
    opened: list[str] = []
    start, leave = ObjectHost.open, ObjectHost.leave

    def noting_start(host: ObjectHost, key: int, row: Any) -> None:
        assert not in_use, "the object before waits for a response, and max_objects=1 has no place for another object"
        in_use.add(key)
        opened.append(row["data_source"])
        start(host, key, row)

    def noting_leave(host: ObjectHost, keys: Any) -> None:
        in_use.difference_update(keys)
        leave(host, keys)

    monkeypatch.setattr(ObjectHost, "open", noting_start)
    monkeypatch.setattr(ObjectHost, "leave", noting_leave)
    config = configured(
        "grpo", "environment=stateful", f"environment.stateful={ENVIRONMENTS}.Judge", "environment.max_objects=1",
        "model.path=model", "data.train_files=[train.parquet]",
    )  # fmt: skip
    row = {"prompt": [], "reward_model": {"ground_truth": ""}, "extra_info": {}}
    rows: Any = {source: {"data_source": source, **row} for source in ("a", "b")}
    tokenizer: Any = build_tokenizer()
    try_environment(config, rows, tokenizer)
    assert opened == ["a", "b"] and not in_use
