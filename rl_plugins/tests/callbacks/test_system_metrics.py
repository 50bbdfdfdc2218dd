"""`SystemMetrics`: load of every node with each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rl_plugins.callbacks import system_metrics
from rl_plugins.callbacks.system_metrics import Sampler, SystemMetrics
from rl_plugins.tests.patience import patient, wait_until


def test_sampler_take_gives_each_sample_once():
    sampler = Sampler("system/node_0/", every_s=0.01)
    sampler.start()
    values: dict[str, float] = {}

    def taken() -> bool:
        values.update(sampler.take())
        return bool(values)

    wait_until(taken, "a sample")
    sampler.ended.set()
    sampler.join(patient(60))
    assert not sampler.is_alive(), "the sampler does not end"
    sampler.take()
    assert sampler.take() == {}
    assert 0 < values["system/node_0/system_memory_usage_percentage"] < 100


def test_system_metrics_sample_each_node_once_and_rank_0_logs_all_nodes(monkeypatch):
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
            strategy=SimpleNamespace(
                model_engine=None, ranks=SimpleNamespace(gather=lambda _, gathers=gathers: next(gathers))
            ),
        )
        callback = SystemMetrics()
        callback.on_train_start(trainer, stage)
        callback.on_train_batch_end(trainer, stage, None, None, 0)
        prefixes.append(callback._sampler and callback._sampler.prefix)
        callback.teardown(trainer, stage, "fit")
    assert prefixes == ["system/node_0/", None, "system/node_1/", None]
    assert logged == [({"rank_0": 0.0, "rank_2": 2.0}, 7)]
