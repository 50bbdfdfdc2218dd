"""How busy the machines are."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from rl_plugins.callbacks import system_metrics
from rl_plugins.callbacks.system_metrics import Sampler, SystemMetrics


def test_samples_are_taken_once():
    sampler = Sampler("system/node_0/", every_s=0.01)
    sampler.start()
    deadline = time.monotonic() + 30
    while not (values := sampler.take()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sampler.ended.set()
    sampler.join(5)
    sampler.take()
    assert sampler.take() == {}
    assert 0 < values["system/node_0/system_memory_usage_percentage"] < 100


def test_every_node_is_sampled_once_and_rank_0_logs_them_all(monkeypatch):
    hosts = ["a", "a", "b", "b"]
    logged: list[tuple[dict[str, float], int]] = []
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append((values, step)))
    samples = [{f"rank_{rank}": float(rank)} if rank in (0, 2) else {} for rank in range(4)]
    monkeypatch.setattr(Sampler, "start", lambda sampler: None)
    monkeypatch.setattr(system_metrics, "clock", lambda stage: stage.step)
    stage: Any = SimpleNamespace(step=7)
    prefixes = []
    for rank in range(4):
        gathers = iter([hosts, samples])
        trainer: Any = SimpleNamespace(
            global_rank=rank,
            is_global_zero=rank == 0,
            loggers=[logger],
            strategy=SimpleNamespace(gather=lambda _, gathers=gathers: next(gathers)),
        )
        callback = SystemMetrics()
        callback.on_train_start(trainer, stage)
        callback.on_train_batch_end(trainer, stage, None, None, 0)
        prefixes.append(callback._sampler and callback._sampler.prefix)
        callback.teardown(trainer, stage, "fit")
    assert prefixes == ["system/node_0/", None, "system/node_1/", None]
    assert logged == [({"rank_0": 0.0, "rank_2": 2.0}, 7)]
