"""Start of a training worker of Ray Train."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from rl_plugins.launch import scorer
from rl_plugins.launch.ray_train import train_worker
from rl_plugins.tests.launch.configurations import configured


class Started(Exception):
    """The worker makes its scorer."""


def test_train_worker_takes_the_threads_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def scorer_of(config: object, judge_urls: object) -> None:
        raise Started

    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(scorer, "scorer_of", scorer_of)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("RL_PLUGINS_JUDGE_KEY", "")
    for cpus in (6.5, 0.5):
        options = ("model.path=model", "run.name=run", f"placement.cpus_per_worker={cpus}", "placement.device=cuda")
        with pytest.raises(Started):
            train_worker({"config": asdict(configured("sft", *options)), "judge_urls": [], "judge_key": "key"})
    assert threads == [6, 1]
