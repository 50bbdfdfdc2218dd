"""Start of a training worker of Ray Train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest
import torch

from rl_plugins.launch import ray_train, scorer
from rl_plugins.launch.ray_train import train_worker
from rl_plugins.tests.launch.configurations import configured


class Started(Exception):
    """The worker makes its scorer."""


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Addresses of the engines of a judge in each start of a worker."""
    found: list[Sequence[str]] = []

    def scorer_of(config: object, judge_urls: Sequence[str]) -> None:
        found.append(judge_urls)
        raise Started

    monkeypatch.setattr(scorer, "scorer_of", scorer_of)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("RL_PLUGINS_JUDGE_KEY", "")
    return found


def start(*options: str, judges: Sequence[str] = ()) -> None:
    config = configured("sft", "model.path=model", "run.name=run", "placement.device=cuda", *options)
    with pytest.raises(Started):
        train_worker({"config": asdict(config), "judges": judges, "judge_key": "key"})


def test_train_worker_takes_the_threads_of_the_option(
    addresses: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for cpus in (6.5, 0.5):
        start(f"placement.cpus_per_worker={cpus}")
    assert threads == [6, 1] and addresses == [[], []]


def test_train_worker_asks_the_engines_of_a_judge_for_their_addresses_in_each_start(
    addresses: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(["10.0.0.1", "10.0.0.2"])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(ray_train, "addresses_of", lambda judges, timeout_s: [f"{next(hosts)}/{one}" for one in judges])
    for _ in range(2):
        start(judges=["judge"])
    assert addresses == [["10.0.0.1/judge"], ["10.0.0.2/judge"]]
