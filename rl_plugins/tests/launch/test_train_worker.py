"""Start of a training worker: its threads, its configuration, and the addresses of the engines of a judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.launch import ray_train, scorer
from rl_plugins.launch.mlflow_run import describe_run
from rl_plugins.launch.ray_train import _StartedRoles, _worker_arguments, train_worker
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.launch.configurations import configured

Starts: TypeAlias = list[tuple[RecipeConfig, Sequence[str]]]


class Started(Exception):
    """The worker makes its scorer."""


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Configuration and addresses of judges of each worker. The workers start no further than to the scorer."""
    found: Starts = []

    def scorer_of(config: RecipeConfig, judge_urls: Sequence[str]) -> None:
        found.append((config, judge_urls))
        raise Started

    monkeypatch.setattr(scorer, "scorer_of", scorer_of)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("RL_PLUGINS_JUDGE_KEY", "")
    return found


def start_worker(*options: str, judges: Sequence[str] = ()) -> None:
    """Start a training worker with the arguments of the driver."""
    config = configured("sft", "run.name=run", *options)
    with pytest.raises(Started):
        train_worker({**_worker_arguments(config, _StartedRoles(None, [], "key", {}, [])), "judges": judges})


def test_train_worker_takes_the_threads_of_the_option(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for cpus in (6.5, 0.5):
        start_worker("model.path=model", f"placement.cpus_per_worker={cpus}", "placement.device=cuda")
    assert threads == [6, 1] and [judges for _, judges in starts] == [[], []]


def test_train_worker_asks_the_engines_of_a_judge_for_their_addresses_in_each_start(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(["10.0.0.1", "10.0.0.2"])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(ray_train, "addresses_of", lambda judges, timeout_s: [f"{next(hosts)}/{one}" for one in judges])
    for _ in range(2):
        start_worker("model.path=model", judges=["judge"])
    assert [judges for _, judges in starts] == [["10.0.0.1/judge"], ["10.0.0.2/judge"]]


def test_train_worker_records_the_expressions_of_the_environment(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setenv("POLICY", "name-of-the-environment")
    start_worker("model.path='${oc.env:POLICY}'")
    ((config, _),) = starts
    assert config.model.path == "name-of-the-environment"
    assert describe_run(config, RunFolder(tmp_path)).params["model.path"] == "${oc.env:POLICY}"
